#include "io/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <set>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "io/say.h"
#include "io/stall_watch.h"
#include "io/unique_fd.h"

namespace overspill::io {

StoreError system_error(Operation operation, const std::filesystem::path& path, std::string detail) {
  return system_error(errno, operation, path, std::move(detail));
}

StoreError system_error(int os_error, Operation operation, const std::filesystem::path& path,
                        std::string detail) {
  rlimit limit{};
  if (os_error == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    detail += fmt::format("{}this process may have {} files open (ulimit -n)", detail.empty() ? "" : "; ",
                          limit.rlim_cur);
  }
  return StoreError({.kind = kind_of_errno(os_error),
                     .operation = operation,
                     .os_error = os_error,
                     .path = path.string(),
                     .detail = std::move(detail)});
}

StoreError no_threads(const std::system_error& error, const std::string& what) {
  return StoreError({.kind = ErrorKind::threads,
                     .operation = Operation::start_thread,
                     .os_error = error.code().value(),
                     .detail = what});
}

void sync_folder(const std::filesystem::path& folder, StallWatch* watch) {
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw system_error(Operation::open, folder);
  const int result = sync_file(watch, fd.get(), folder.string());
  if (result != 0 && result != EINVAL && result != EOPNOTSUPP)
    throw system_error(result, Operation::sync, folder);
}

namespace {

std::optional<FileLook> look_at_entry(int fd, const char* path, int flags) {
  constexpr unsigned kWanted = STATX_BASIC_STATS;
  constexpr int kStatxBlock = 512;
  struct statx info {};
  if (::statx(fd, path, flags | AT_STATX_FORCE_SYNC, kWanted, &info) != 0) return std::nullopt;
  return FileLook{
      .id = {makedev(info.stx_dev_major, info.stx_dev_minor), info.stx_ino},
      .bytes = static_cast<int64_t>(info.stx_size),
      .taken_bytes = static_cast<int64_t>(info.stx_blocks) * kStatxBlock,
      .names = info.stx_nlink,
      .own_regular = S_ISREG(info.stx_mode) && info.stx_uid == ::geteuid() && (info.stx_mode & 022) == 0,
  };
}

}  // namespace

std::optional<FileLook> look_at(const std::filesystem::path& path) {
  return look_at_entry(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW);
}

std::optional<FileLook> look_at(int fd) {
  return look_at_entry(fd, "", AT_EMPTY_PATH);
}

bool same_file(int fd, const std::filesystem::path& path) {
  struct stat by_fd {};
  struct stat by_name {};
  return ::fstat(fd, &by_fd) == 0 && ::lstat(path.c_str(), &by_name) == 0 && by_fd.st_ino == by_name.st_ino &&
         by_fd.st_dev == by_name.st_dev;
}

bool refuses_links(int os_error) {
  return os_error == EXDEV || os_error == EPERM || os_error == EMLINK || os_error == EOPNOTSUPP ||
         os_error == ENOSYS;
}

int64_t available_bytes(const std::filesystem::path& path) {
  struct statvfs info {};
  if (::statvfs(path.c_str(), &info) != 0) return 0;
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

bool beyond_limit(int64_t file_bytes) {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
         static_cast<uint64_t>(file_bytes) > limit.rlim_cur;
}

// Not posix_fallocate: where the kernel has no call for it, that writes one byte to each block.
int take_space(int fd, int64_t bytes) {
  while (::fallocate(fd, 0, 0, bytes) != 0) {
    if (errno == EINTR) continue;
    return errno == ENOSYS ? EOPNOTSUPP : errno;
  }
  return 0;
}

int take_space_by_writing(int fd, int64_t bytes, const std::function<void()>& moved) {
  constexpr int64_t kRunBytes = int64_t{4} << 20;
  const std::vector<std::byte> zeros(static_cast<size_t>(std::min(bytes, kRunBytes)));
  for (int64_t at = 0; at < bytes;) {
    const ssize_t written =
        ::pwrite(fd, zeros.data(), std::min(zeros.size(), static_cast<size_t>(bytes - at)), at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : ENOSPC;
    at += written;
    moved();
  }
  // Some file systems look for room only when the bytes leave memory.
  return ::fdatasync(fd) == 0 ? 0 : errno;
}

bool has_shared_blocks(int fd, int64_t offset, int64_t bytes) {
  constexpr unsigned kExtents = 64;
  const int64_t end = offset + bytes;
  std::vector<std::byte> memory(sizeof(fiemap) + kExtents * sizeof(fiemap_extent));
  auto* const map = reinterpret_cast<fiemap*>(memory.data());
  while (offset < end) {
    *map = {};
    map->fm_start = static_cast<uint64_t>(offset);
    map->fm_length = static_cast<uint64_t>(end - offset);
    map->fm_extent_count = kExtents;
    if (::ioctl(fd, FS_IOC_FIEMAP, map) != 0 || map->fm_mapped_extents == 0) return false;
    for (unsigned i = 0; i < map->fm_mapped_extents; ++i) {
      const fiemap_extent& extent = map->fm_extents[i];
      if ((extent.fe_flags & FIEMAP_EXTENT_SHARED) != 0) return true;
      offset = static_cast<int64_t>(extent.fe_logical + extent.fe_length);
    }
  }
  return false;
}

void warn_once(const std::string& text) {
  static Mutex mutex;
  static std::set<std::string> said GUARDED_BY(mutex);
  const MutexLock lock(mutex);
  if (said.insert(text).second) say_on_stderr("overspill: warning: " + text);
}

}  // namespace overspill::io
