#include "tests/engine/file_calls.h"

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <mutex>
#include <string>

namespace overspill::testing {
namespace {

std::atomic<FileWatcher*> watching = nullptr;
std::mutex in_order;

using Kind = FileCall::Kind;

/// `call` returns -1 with errno, or what the call returns; `data_of` what was written, given that.
template <class Call>
auto watched(FileCall seen, const void* data, Call call) -> decltype(call()) {
  FileWatcher* const watcher = watching;
  if (watcher == nullptr) return call();
  if (const int os_error = watcher->failure_of(seen)) {
    errno = os_error;
    return -1;
  }
  if ((seen.kind == Kind::sync || seen.kind == Kind::sync_all) && !watcher->syncs()) {
    watcher->done(seen, {});
    return 0;
  }
  // Together, so that what is seen has the order in which it happened: a rank's thread may use what another's
  // made.
  const std::lock_guard lock(in_order);
  const auto result = call();
  if (result < 0) return result;
  const int os_error = errno;
  if (seen.kind == Kind::open) seen.fd = static_cast<int>(result);
  const bool written = seen.kind == Kind::write;
  watcher->done(seen, {static_cast<const std::byte*>(data), written ? static_cast<size_t>(result) : 0});
  errno = os_error;
  return result;
}

/// The whole path of a name in an open folder.
std::string in_folder(int folder, const char* name) {
  if (name[0] == '/') return name;
  std::array<char, 4096> path{};
  const std::string link = "/proc/self/fd/" + std::to_string(folder);
  const ssize_t bytes = ::readlink(link.c_str(), path.data(), path.size());
  return std::string(path.data(), bytes > 0 ? static_cast<size_t>(bytes) : 0) + "/" + name;
}

}  // namespace

const char* name_of(FileCall::Kind kind) {
  static constexpr const char* kNames[] = {"open",     "close", "write", "allocate", "sync",
                                           "sync all", "mkdir", "link",  "rename",   "remove"};
  return kNames[static_cast<size_t>(kind)];
}

WatchedFiles::WatchedFiles(FileWatcher& watcher) {
  watching = &watcher;
}
WatchedFiles::~WatchedFiles() {
  watching = nullptr;
}

}  // namespace overspill::testing

// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names
extern "C" {

using overspill::testing::FileCall;
using overspill::testing::FileWatcher;
using overspill::testing::in_folder;
using overspill::testing::watched;
using overspill::testing::watching;

int __real_open(const char* path, int flags, ...);
int __real_openat(int folder, const char* name, int flags, ...);
int __real_close(int fd);
ssize_t __real_write(int fd, const void* data, size_t bytes);
ssize_t __real_pwrite(int fd, const void* data, size_t bytes, off_t offset);
int __real_fallocate(int fd, int mode, off_t offset, off_t bytes);
int __real_fsync(int fd);
int __real_syncfs(int fd);
int __real_fdatasync(int fd);
int __real_mkdir(const char* path, mode_t mode);
int __real_mkdirat(int folder, const char* name, mode_t mode);
int __real_link(const char* from, const char* to);
int __real_rename(const char* from, const char* to);
int __real_rmdir(const char* path);
int __real_unlink(const char* path);
int __real_unlinkat(int folder, const char* name, int flags);

int __wrap_open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return watched({.kind = FileCall::Kind::open, .path = path, .flags = flags}, nullptr,
                 [&] { return __real_open(path, flags, mode); });
}

int __wrap_openat(int folder, const char* name, int flags, ...) {
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return watched({.kind = FileCall::Kind::open, .path = in_folder(folder, name), .flags = flags}, nullptr,
                 [&] { return __real_openat(folder, name, flags, mode); });
}

// Told before it happens: another thread may be given the number at once.
int __wrap_close(int fd) {
  if (FileWatcher* const watcher = watching) watcher->done({.kind = FileCall::Kind::close, .fd = fd}, {});
  return __real_close(fd);
}

ssize_t __wrap_write(int fd, const void* data, size_t bytes) {
  return watched({.kind = FileCall::Kind::write, .fd = fd, .bytes = static_cast<int64_t>(bytes)}, data,
                 [&] { return __real_write(fd, data, bytes); });
}

ssize_t __wrap_pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  return watched(
      {.kind = FileCall::Kind::write, .fd = fd, .offset = offset, .bytes = static_cast<int64_t>(bytes)}, data,
      [&] { return __real_pwrite(fd, data, bytes, offset); });
}

int __wrap_fallocate(int fd, int mode, off_t offset, off_t bytes) {
  return watched({.kind = FileCall::Kind::allocate, .fd = fd, .offset = offset, .bytes = bytes}, nullptr,
                 [&] { return __real_fallocate(fd, mode, offset, bytes); });
}

int __wrap_syncfs(int fd) {
  return watched({.kind = FileCall::Kind::sync_all, .fd = fd}, nullptr, [&] { return __real_syncfs(fd); });
}

int __wrap_fsync(int fd) {
  return watched({.kind = FileCall::Kind::sync, .fd = fd}, nullptr, [&] { return __real_fsync(fd); });
}

int __wrap_fdatasync(int fd) {
  return watched({.kind = FileCall::Kind::sync, .fd = fd}, nullptr, [&] { return __real_fdatasync(fd); });
}

int __wrap_mkdir(const char* path, mode_t mode) {
  return watched({.kind = FileCall::Kind::make_folder, .path = path}, nullptr,
                 [&] { return __real_mkdir(path, mode); });
}

int __wrap_mkdirat(int folder, const char* name, mode_t mode) {
  return watched({.kind = FileCall::Kind::make_folder, .path = in_folder(folder, name)}, nullptr,
                 [&] { return __real_mkdirat(folder, name, mode); });
}

int __wrap_link(const char* from, const char* to) {
  return watched({.kind = FileCall::Kind::link, .path = from, .other = to}, nullptr,
                 [&] { return __real_link(from, to); });
}

int __wrap_rename(const char* from, const char* to) {
  return watched({.kind = FileCall::Kind::rename, .path = from, .other = to}, nullptr,
                 [&] { return __real_rename(from, to); });
}

int __wrap_rmdir(const char* path) {
  return watched({.kind = FileCall::Kind::remove, .path = path}, nullptr, [&] { return __real_rmdir(path); });
}

int __wrap_unlink(const char* path) {
  return watched({.kind = FileCall::Kind::remove, .path = path}, nullptr,
                 [&] { return __real_unlink(path); });
}

int __wrap_unlinkat(int folder, const char* name, int flags) {
  return watched({.kind = FileCall::Kind::remove, .path = in_folder(folder, name)}, nullptr,
                 [&] { return __real_unlinkat(folder, name, flags); });
}
}
// NOLINTEND(bugprone-reserved-identifier)
