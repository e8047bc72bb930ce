#include "io/job_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
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

#include "io/store.h"

namespace overspill::io {
namespace {

constexpr std::string_view kFolderPrefix = "overspill-";
constexpr std::string_view kSlabPrefix = "slab-";
constexpr std::string_view kLockName = "lock";
constexpr std::string_view kRemoving = "removing";  // in a lock that is held to remove a dead run's folder
constexpr auto kAMoment = std::chrono::seconds(1);  // for whoever takes a lock to say in it what for
constexpr mode_t kOwnerOnly = 0600;

StoreError invalid_job(const std::string& job) {
  return StoreError(
      {.kind = ErrorKind::invalid,
       .operation = Operation::open,
       .detail = fmt::format("job name \"{}\": wanted letters, digits, '-', '_', '.', not first", job)});
}

void check_job(const std::string& job) {
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
  if (job.empty() || job.front() == '.' || job.find_first_not_of(kAllowed) != std::string::npos)
    throw invalid_job(job);
}

std::string read_text(int fd) {
  std::array<char, 64> text{};
  const ssize_t bytes = ::pread(fd, text.data(), text.size(), 0);
  return bytes > 0 ? std::string(text.data(), static_cast<size_t>(bytes)) : "";
}

bool say_in(int fd, std::string_view text) {
  return ::ftruncate(fd, 0) == 0 && ::pwrite(fd, text.data(), text.size(), 0) >= 0;
}

// What cannot be removed takes space, nothing else: errors are ignored. The caller holds the folder's lock.
void remove_slabs(const std::filesystem::path& folder) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (entry.path().filename().string().starts_with(kSlabPrefix)) ::unlink(entry.path().c_str());
  }
}

// On Btrfs every write takes new room, so that reserved space may be full when it is needed; files made in
// the folder from now on are written in place. Our own checksums stand in for those that Btrfs then does
// without.
void write_in_place(const std::filesystem::path& folder) {
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct statfs info {};
  int flags = 0;
  if (!fd || ::fstatfs(fd.get(), &info) != 0 || info.f_type != BTRFS_SUPER_MAGIC) return;
  if (::ioctl(fd.get(), FS_IOC_GETFLAGS, &flags) != 0) return;
  flags |= FS_NOCOW_FL;
  ::ioctl(fd.get(), FS_IOC_SETFLAGS, &flags);  // refused: as before
}

void remove_folder(const std::filesystem::path& folder) {
  remove_slabs(folder);
  // The lock last: as long as it is there and held, nobody else works in the folder.
  ::unlink((folder / kLockName).c_str());
  ::rmdir(folder.c_str());
}

// A killed run cannot clean up after itself, and its job name may never come again. Its lock is free, though:
// whoever gets it owns what lies there. A folder without a lock belongs to a run that is just starting.
void remove_dead_runs(const std::filesystem::path& path) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(path, ignored)) {
    if (!entry.path().filename().string().starts_with(kFolderPrefix)) continue;
    const auto lock_path = entry.path() / kLockName;
    const UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    // Killed before it made its lock, or after it removed it. Who is about to make one makes the folder
    // again.
    if (!lock && errno == ENOENT) ::rmdir(entry.path().c_str());
    if (lock && ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0 && same_file(lock.get(), lock_path)) {
      say_in(lock.get(), kRemoving);
      remove_folder(entry.path());
    }
  }
}

}  // namespace

JobFolder::JobFolder(const std::filesystem::path& path, const std::string& job, bool direct)
    : path_(path / (std::string(kFolderPrefix) + job)), owner_(::getpid()), direct_(direct) {
  check_job(job);
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) {
    errno = error ? error.value() : ENOENT;
    throw system_error(Operation::open, path, "the store's path must be an existing folder");
  }
  remove_dead_runs(path);
  take_lock(job);
  remove_slabs(path_);
  write_in_place(path_);
  if (direct_) try_direct();
}

JobFolder::~JobFolder() {
  if (!lock_ || ::getpid() != owner_) return;  // moved from, or a forked child's copy
  remove_folder(path_);
}

void JobFolder::take_lock(const std::string& job) {
  const auto lock_path = path_ / kLockName;
  const auto patience_ends = std::chrono::steady_clock::now() + kAMoment;
  while (true) {
    if (::mkdir(path_.c_str(), 0700) != 0 && errno != EEXIST) throw system_error(Operation::open, path_);
    UniqueFd fd(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly));
    if (!fd && errno == ENOENT) continue;  // a run that ended removed the folder in between
    if (!fd) {
      const StoreError error = system_error(Operation::open, lock_path);
      ::rmdir(path_.c_str());  // goes only if it is empty
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
      throw StoreError({.kind = ErrorKind::locked,
                        .operation = Operation::open,
                        .path = path_.string(),
                        .detail = fmt::format("job \"{}\" is held by process {}", job,
                                              holder.empty() ? "(unknown)" : holder)});
    }
    if (!same_file(fd.get(), lock_path)) continue;  // the lock of a folder removed in between
    if (!say_in(fd.get(), std::to_string(owner_))) {
      const StoreError error = system_error(Operation::open, lock_path);
      remove_folder(path_);
      throw error;
    }
    lock_ = std::move(fd);
    return;
  }
}

// The kernel's numbers decide where it tells them. Some file systems take the flag and refuse the transfer,
// so one is tried too.
void JobFolder::try_direct() {
  direct_ = false;
  direct_refusal_ = "O_DIRECT refused";
  const auto probe = path_ / (std::string(kSlabPrefix) + "probe");
  const UniqueFd fd(
      ::open(probe.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly));
  if (!fd) {
    ::unlink(probe.c_str());  // the file is made before the flag is refused
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
  ::unlink(probe.c_str());
  direct_ = refusal.empty();
  direct_refusal_ = std::move(refusal);
}

int64_t JobFolder::available_bytes() const {
  return io::available_bytes(path_);
}

SlabFile JobFolder::create_slab(uint32_t number, int64_t bytes, int64_t wanted_bytes) {
  SlabFile slab{.path = path_ / fmt::format("{}{}.bin", kSlabPrefix, number), .fd = {}, .bytes = bytes};
  const auto fail = [&](int os_error) {
    const std::string detail = fmt::format("wanted {} bytes, {} of them in this file; {} bytes are available",
                                           wanted_bytes, bytes, available_bytes());
    errno = os_error;
    return system_error(Operation::reserve, slab.path, detail);
  };
  rlimit limit{};
  // Beyond this limit the kernel would send SIGXFSZ, which ends the process.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      static_cast<uint64_t>(bytes) > limit.rlim_cur) {
    throw fail(EFBIG);
  }
  // The space is taken without O_DIRECT: where fallocate is missing, the C library writes single bytes.
  UniqueFd buffered(
      ::open(slab.path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, kOwnerOnly));
  if (!buffered) throw fail(errno);
  int result = 0;
  do {
    result = ::posix_fallocate(buffered.get(), 0, bytes);
  } while (result == EINTR);
  if (result == 0 && direct_) {
    slab.fd = UniqueFd(::open(slab.path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC | O_NOFOLLOW));
    if (!slab.fd) result = errno;
  }
  if (result != 0) {
    const StoreError error = fail(result);
    ::unlink(slab.path.c_str());
    throw error;
  }
  if (!direct_) slab.fd = std::move(buffered);
  return slab;
}

}  // namespace overspill::io
