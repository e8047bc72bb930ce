#include "io/job_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "io/lock_holder.h"
#include "io/owned_folder.h"
#include "io/stall_watch.h"
#include "io/store.h"

namespace overspill::io {
namespace {

constexpr std::string_view kFolderPrefix = "overspill-";
constexpr mode_t kFolderMode = 0700;
constexpr const char* kLockName = "lock";
constexpr auto kAMoment = std::chrono::seconds(1);     // for whoever takes a lock to say in it what for
constexpr auto kWord = std::chrono::milliseconds(20);  // from the lock to that word
constexpr auto kRemoval = std::chrono::seconds(60);    // of slabs, by another run
constexpr mode_t kOwnerOnly = 0600;

StoreError invalid_job(const std::string& job) {
  return StoreError(
      {.kind = ErrorKind::invalid,
       .operation = Operation::open,
       .detail = fmt::format(
           "engine.job (--job) is \"{}\": a name has letters, digits, '-', '_' and '.', and does not "
           "begin with '.'",
           job)});
}

void check_job(const std::string& job) {
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
  if (job.empty() || job.front() == '.' || job.find_first_not_of(kAllowed) != std::string::npos)
    throw invalid_job(job);
}

std::string read_text(int fd) {
  std::array<char, 512> text{};
  const ssize_t bytes = ::pread(fd, text.data(), text.size(), 0);
  return bytes > 0 ? std::string(text.data(), static_cast<size_t>(bytes)) : "";
}

bool say_in(int fd, std::string_view text) {
  return ::ftruncate(fd, 0) == 0 && ::pwrite(fd, text.data(), text.size(), 0) >= 0;
}

// What cannot be removed takes space, nothing else: errors are ignored. The caller holds the folder's lock.
void remove_slabs(int folder) {
  for (const std::string& name : names_in(folder, kSlabPrefix)) ::unlinkat(folder, name.c_str(), 0);
}

// On Btrfs every write takes new room, so that reserved space may be full when it is needed; files made in
// the folder from now on are written in place. Our own checksums stand in for those that Btrfs then does
// without.
void write_in_place(int folder) {
  struct statfs info {};
  int flags = 0;
  if (::fstatfs(folder, &info) != 0 || info.f_type != BTRFS_SUPER_MAGIC) return;
  if (::ioctl(folder, FS_IOC_GETFLAGS, &flags) != 0) return;
  flags |= FS_NOCOW_FL;
  ::ioctl(folder, FS_IOC_SETFLAGS, &flags);  // refused: as before
}

void remove_folder(int base, int folder, const std::string& name) {
  remove_slabs(folder);
  // The lock last: as long as it is there and held, nobody else works in the folder.
  ::unlinkat(folder, kLockName, 0);
  ::unlinkat(base, name.c_str(), AT_REMOVEDIR);
}

UniqueFd open_lock(int folder, int flags) {
  // O_NONBLOCK: whatever else has the name must not hang who looks.
  return UniqueFd(::openat(folder, kLockName, flags | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly));
}

// Whether a lock that this process was given is free for all: where locks end at a machine's border, the run
// that wrote its name into it may live on another one.
bool surely_dead(int lock, const LockHolder& holder) {
  return holder.process.empty() || holder.on_this_machine() || is_of_one_machine(lock);
}

// Somebody else's folder is never touched. Its owner's next run here removes it, if one comes.
void look_at_foreign(int folder, const std::filesystem::path& path, const std::string& why) {
  const UniqueFd lock = open_lock(folder, O_RDONLY);
  if (!lock || !same_regular_file(lock.get(), folder, kLockName)) return;
  if (::flock(lock.get(), LOCK_SH | LOCK_NB) != 0) return;
  warn_once(fmt::format("{} was left by a run that has ended, and is not removed: {}", path.string(), why));
}

// A folder in a setgid folder is setgid too.
bool is_for_its_owner_alone(int folder) {
  struct stat info {};
  return ::fstat(folder, &info) == 0 && (info.st_mode & 0777) == kFolderMode;
}

// False while a run lives there. Another run that removes the folder just now is waited for: until its slabs
// have lost their names here, nobody can go on in them (taking_over.h).
bool take_dead(int lock) {
  const auto begun = std::chrono::steady_clock::now();
  while (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const auto waited = std::chrono::steady_clock::now() - begun;
    if (waited > (read_text(lock) == kRemoving ? kRemoval : kWord)) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// A killed run cannot clean up after itself, and its job name may never come again. Its lock is free, though:
// whoever gets it owns what lies there. A folder without a lock belongs to a run that is just starting.
void remove_dead_run(int base, const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  const UniqueFd folder = open_folder(base, name);
  if (!folder) {
    if (errno == ENOTDIR || errno == ELOOP)
      warn_once(fmt::format("{} has the name of a run's folder, but it is {}: Overspill leaves it alone",
                            path.string(), kind_of_entry(base, name)));
    return;
  }
  if (const std::string why = distrust(base, folder.get()); !why.empty())
    return look_at_foreign(folder.get(), path, why);
  const UniqueFd lock = open_lock(folder.get(), O_RDWR);
  // Killed before it made its lock, or after it removed it. Who is about to make one makes the folder again.
  // A folder of the user's that only begins like ours is as empty, but was hardly made for its owner alone.
  if (!lock && errno == ENOENT && is_for_its_owner_alone(folder.get()))
    ::unlinkat(base, name.c_str(), AT_REMOVEDIR);
  if (!lock || !take_dead(lock.get())) return;
  if (!same_regular_file(lock.get(), folder.get(), kLockName)) return;
  const LockHolder holder = LockHolder::parse(read_text(lock.get()));
  if (!surely_dead(lock.get(), holder)) {
    warn_once(fmt::format(
        "{} belongs to {}. Its lock is free here, but another machine may hold a lock on this file system "
        "that this one does not see, so the folder is not removed. If that run has ended, remove the folder",
        path.string(), holder.description()));
    return;
  }
  say_in(lock.get(), kRemoving);
  remove_folder(base, folder.get(), name);
}

void remove_dead_runs(int base, const std::filesystem::path& path) {
  for (const std::string& name : names_in(base, kFolderPrefix)) remove_dead_run(base, path / name);
}

void warn_of_open_base(int base, const std::filesystem::path& path) {
  struct stat info {};
  if (::fstat(base, &info) != 0 || (info.st_mode & S_IWOTH) == 0 || (info.st_mode & S_ISVTX) != 0) return;
  warn_once(
      fmt::format("every user may rename and remove what lies in {} (mode {:04o}): chmod +t, or a folder "
                  "of your own, keeps a run's files safe",
                  path.string(), info.st_mode & 07777));
}

int reserve_space(StallWatch* watch, const SlabFile& slab, int64_t bytes) {
  const int result = watched(watch, Operation::reserve, slab.fd.get(), slab.path.string(),
                             [bytes](int file) { return take_space(file, bytes); });
  if (result != EOPNOTSUPP) return result;
  warn_once(
      fmt::format("the file system of {} has no fallocate: zeros are written to reserve space there, which "
                  "takes as long as writing all of it",
                  slab.path.parent_path().string()));
  StallWatch::Progress progress(watch, Operation::reserve, slab.path.string());
  return take_space_by_writing(slab.fd.get(), bytes, [&] { progress.moved(); });
}

}  // namespace

JobFolder::JobFolder(const std::filesystem::path& path, const std::string& job, bool direct)
    : path_(std::filesystem::absolute(path) / (std::string(kFolderPrefix) + job)),
      base_(open_base(path)),
      owner_(::getpid()),
      direct_(direct) {
  check_job(job);
  warn_of_open_base(base_.get(), path);
  remove_dead_runs(base_.get(), path_.parent_path());
  take_lock(job);
  remove_slabs(folder_.get());
  write_in_place(folder_.get());
  if (direct_) try_direct();
}

JobFolder::~JobFolder() {
  if (!lock_ || ::getpid() != owner_) return;  // moved from, or a forked child's copy
  remove_folder(base_.get(), folder_.get(), path_.filename().string());
}

void JobFolder::open_or_make() {
  const std::string name = path_.filename().string();
  const auto refuse = [&](const std::string& why) {
    return StoreError(
        {.kind = ErrorKind::denied, .operation = Operation::open, .path = path_.string(), .detail = why});
  };
  while (true) {
    const bool made = ::mkdirat(base_.get(), name.c_str(), kFolderMode) == 0;
    if (!made && errno != EEXIST) throw system_error(Operation::open, path_);
    folder_ = open_folder(base_.get(), name);
    if (!folder_ && errno == ENOENT) continue;  // a run that ended removed it in between
    if (!folder_ && (errno == ENOTDIR || errno == ELOOP)) {
      throw refuse(
          fmt::format("it is {}, where a run's folder has to be a folder itself: remove it, or choose "
                      "another job name (engine.job, --job)",
                      kind_of_entry(base_.get(), name)));
    }
    if (!folder_) throw system_error(Operation::open, path_);
    if (made) return;
    const std::string why = distrust(base_.get(), folder_.get());
    if (why.empty()) return;
    throw refuse(why + "; remove it, or choose another job name (engine.job, --job)");
  }
}

void JobFolder::take_lock(const std::string& job) {
  const auto lock_path = path_ / kLockName;
  const auto patience_ends = std::chrono::steady_clock::now() + kAMoment;
  while (true) {
    open_or_make();
    UniqueFd fd = open_lock(folder_.get(), O_RDWR | O_CREAT);
    if (!fd && errno == ENOENT) continue;  // a run that ended removed the folder in between
    if (!fd) {
      const StoreError error = system_error(Operation::open, lock_path);
      ::unlinkat(base_.get(), path_.filename().c_str(), AT_REMOVEDIR);  // goes only if it is empty
      throw error;
    }
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) throw system_error(Operation::open, lock_path);
      const std::string holder = read_text(fd.get());
      // A run that looks for dead ones may be it: it found the lock free, which was made a moment ago.
      if (holder == kRemoving || std::chrono::steady_clock::now() < patience_ends) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
      throw StoreError(
          {.kind = ErrorKind::locked,
           .operation = Operation::open,
           .path = path_.string(),
           .detail = fmt::format("job \"{}\" is held by {}", job, LockHolder::parse(holder).description())});
    }
    // The lock of a folder removed in between.
    if (!same_regular_file(fd.get(), folder_.get(), kLockName)) continue;
    require_dead(job, fd.get());
    if (!say_in(fd.get(), LockHolder::self().text())) {
      const StoreError error = system_error(Operation::open, lock_path);
      remove_folder(base_.get(), folder_.get(), path_.filename().string());
      throw error;
    }
    lock_ = std::move(fd);
    return;
  }
}

void JobFolder::require_dead(const std::string& job, int lock) const {
  const LockHolder holder = LockHolder::parse(read_text(lock));
  if (surely_dead(lock, holder)) return;
  throw StoreError({.kind = ErrorKind::locked,
                    .operation = Operation::open,
                    .path = path_.string(),
                    .detail = fmt::format(
                        "job \"{}\" was taken by {}; its lock is free here, but another machine may hold a "
                        "lock on this file system that this one does not see. If that run has ended, remove "
                        "the folder",
                        job, holder.description())});
}

// The kernel's numbers decide where it tells them. Some file systems take the flag and refuse the transfer,
// so one is tried too.
void JobFolder::try_direct() {
  direct_ = false;
  direct_refusal_ = "O_DIRECT refused";
  const std::string probe = std::string(kSlabPrefix) + "probe";
  const UniqueFd fd(::openat(folder_.get(), probe.c_str(),
                             O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly));
  if (!fd) {
    ::unlinkat(folder_.get(), probe.c_str(), 0);  // the file is made before the flag is refused
    return;
  }
  const std::unique_ptr<void, decltype(&std::free)> block(std::aligned_alloc(kBlockBytes, kBlockBytes),
                                                          &std::free);
  std::fill_n(static_cast<char*>(block.get()), kBlockBytes, '\0');
  alignment_ = direct_alignment_of(fd.get());
  std::string refusal = alignment_ ? refusal_of(*alignment_) : "";
  if (refusal.empty() && (::pwrite(fd.get(), block.get(), kBlockBytes, 0) != kBlockBytes ||
                          ::pread(fd.get(), block.get(), kBlockBytes, 0) != kBlockBytes)) {
    refusal = "O_DIRECT refused";
  }
  ::unlinkat(folder_.get(), probe.c_str(), 0);
  direct_ = refusal.empty();
  direct_refusal_ = std::move(refusal);
}

int64_t JobFolder::available_bytes() const {
  return io::available_bytes(path_);
}

SlabFile JobFolder::create_slab(uint32_t number, int64_t bytes, int64_t wanted_bytes, StallWatch* watch) {
  SlabFile slab{.path = path_ / fmt::format("{}{}.bin", kSlabPrefix, number), .fd = {}, .bytes = bytes};
  const auto fail = [&](int os_error) {
    const std::string detail = fmt::format("wanted {} bytes, {} of them in this file; {} bytes are available",
                                           wanted_bytes, bytes, available_bytes());
    return system_error(os_error, Operation::reserve, slab.path, detail);
  };
  if (beyond_limit(bytes)) throw fail(EFBIG);
  // Without O_DIRECT, which zeros may have to be written without.
  const std::string name = slab.path.filename().string();
  slab.fd = UniqueFd(
      ::openat(folder_.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly));
  if (!slab.fd) throw fail(errno);
  int result = reserve_space(watch, slab, bytes);
  // The same file, not one that has its name by now.
  if (result == 0 && direct_ && ::fcntl(slab.fd.get(), F_SETFL, O_DIRECT) != 0) result = errno;
  if (result != 0) {
    const StoreError error = fail(result);
    ::unlinkat(folder_.get(), name.c_str(), 0);
    throw error;
  }
  if (const auto look = look_at(slab.fd.get())) slab.id = look->id;
  return slab;
}

SlabFile JobFolder::link_slab(uint32_t number, const std::filesystem::path& outside, const FileId& id,
                              int64_t names, StallWatch* watch) {
  const std::string name = fmt::format("{}{}.bin", kSlabPrefix, number);
  SlabFile slab{.path = path_ / name, .fd = {}, .id = id};
  const auto refuse = [&](const char* why) {
    return StoreError(
        {.kind = ErrorKind::denied, .operation = Operation::link, .path = outside.string(), .detail = why});
  };
  if (::linkat(AT_FDCWD, outside.c_str(), folder_.get(), name.c_str(), 0) != 0)
    throw system_error(Operation::link, slab.path, fmt::format("hard link to {}", outside.string()));
  try {
    slab.fd = UniqueFd(::openat(folder_.get(), name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (!slab.fd) throw system_error(Operation::open, outside);
    // After the link: of two runs that take one slab at once, at least one sees the other's name.
    const FileLook look = look_at(slab.fd.get()).value_or(FileLook{});
    if (look.id != id || !same_regular_file(slab.fd.get(), folder_.get(), name.c_str()))
      throw refuse("another file has this name by now");
    if (look.names != names + 1) throw refuse("it has further names");
    slab.bytes = look.bytes;
    if (has_shared_blocks(slab.fd.get(), 0, slab.bytes))
      throw refuse("it shares blocks with another file, so that a write to it takes new room");
    if (beyond_limit(slab.bytes)) throw system_error(EFBIG, Operation::open, outside);
    // A copy may have holes. What fallocate takes before it finds no more would be lost to everybody.
    if (slab.bytes - look.taken_bytes > available_bytes())
      throw system_error(ENOSPC, Operation::reserve, outside);
    const int result = watched(watch, Operation::reserve, slab.fd.get(), outside.string(),
                               [&](int file) { return take_space(file, slab.bytes); });
    if (result != 0 && (result != EOPNOTSUPP || look.taken_bytes < slab.bytes))
      throw system_error(result, Operation::reserve, outside);
    if (direct_ && ::fcntl(slab.fd.get(), F_SETFL, O_DIRECT) != 0)
      throw system_error(Operation::open, outside);
  } catch (...) {
    ::unlinkat(folder_.get(), name.c_str(), 0);
    throw;
  }
  return slab;
}

}  // namespace overspill::io
