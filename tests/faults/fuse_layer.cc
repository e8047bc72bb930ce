// A file system that hands everything on to another folder, and fails as the shared FuseFaults says.
//   fuse_layer BACKING FAULTS_FD MOUNTPOINT
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <fcntl.h>
#include <fuse.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "tests/faults/fuse_faults.h"

namespace overspill::testing {
namespace {

int backing = -1;
FuseFaults* faults = nullptr;

const char* relative(const char* path) {
  return path[1] == '\0' ? "." : path + 1;
}

int file_of(const fuse_file_info* info) {
  return static_cast<int>(info->fh);
}

int result(int value) {
  return value < 0 ? -errno : value;
}

/// The error that this operation shall end with, 0 for none.
int injected(FuseOperation operation) {
  if ((faults->operations & static_cast<uint32_t>(operation)) == 0) return 0;
  if (faults->let_through.fetch_sub(1) > 0 || faults->failures.fetch_sub(1) <= 0) return 0;
  ++faults->failed;
  return -faults->os_error;
}

/// While it is told to; false when the caller was interrupted meanwhile.
bool hang(FuseOperation operation) {
  if (!faults->hang || (faults->hangs & static_cast<uint32_t>(operation)) == 0) return true;
  if (faults->hang_lets_through-- > 0) return true;
  ++faults->hanging;
  bool interrupted = false;
  while (faults->hang && !interrupted) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    interrupted = fuse_interrupted() != 0;
  }
  --faults->hanging;
  return !interrupted;
}

/// Waits as told; false when the caller was interrupted meanwhile.
bool dawdle(int64_t offset, FuseOperation operation) {
  if (const int64_t most = faults->delay_us; most > 0) {
    ++faults->delayed;
    std::this_thread::sleep_for(std::chrono::microseconds((offset / 4096 * 2654435761) % most));
  }
  return hang(operation);
}

void* init(fuse_conn_info*, fuse_config* config) {
  config->use_ino = 1;
  config->nullpath_ok = 1;
  config->hard_remove = faults->keeps_open_names ? 0 : 1;
  config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
  return nullptr;
}

int get_attributes(const char* path, struct stat* status, fuse_file_info* info) {
  if (info != nullptr) return result(::fstat(file_of(info), status));
  if (path == nullptr) return -ESTALE;
  return result(::fstatat(backing, relative(path), status, AT_SYMLINK_NOFOLLOW));
}

int open_file(const char* path, fuse_file_info* info, int flags, mode_t mode) {
  const int file = ::openat(backing, relative(path), flags & ~(O_DIRECT | O_NOFOLLOW), mode);
  if (file < 0) return -errno;
  info->fh = static_cast<uint64_t>(file);
  info->direct_io = 1;  // every read and write comes here; a short one is not filled up with zeros
  return 0;
}

int open(const char* path, fuse_file_info* info) {
  return open_file(path, info, info->flags, 0);
}

int create(const char* path, mode_t mode, fuse_file_info* info) {
  if (const int error = injected(FuseOperation::name)) return error;
  return open_file(path, info, info->flags | O_CREAT, mode);
}

int release(const char*, fuse_file_info* info) {
  return result(::close(file_of(info)));
}

int read(const char*, char* to, size_t bytes, off_t offset, fuse_file_info* info) {
  const int64_t number = ++faults->reads;
  if (!dawdle(offset, FuseOperation::read)) return -EINTR;
  if (const int error = injected(FuseOperation::read)) return error;
  if (faults->short_reads && bytes > 4096) {
    bytes = std::max<size_t>(4096, bytes / 2);
    ++faults->shortened;
  }
  const auto got = static_cast<int>(::pread(file_of(info), to, bytes, offset));
  if (const int64_t every = faults->flip_every; got > 0 && every > 0 && number % every == 0) {
    to[number % got] = static_cast<char>(to[number % got] ^ 1 << number % 8);
    ++faults->flipped;
  }
  return result(got);
}

int write(const char*, const char* from, size_t bytes, off_t offset, fuse_file_info* info) {
  ++faults->writes;
  if (!dawdle(offset, FuseOperation::write)) return -EINTR;
  if (const int error = injected(FuseOperation::write)) return error;
  return result(static_cast<int>(::pwrite(file_of(info), from, bytes, offset)));
}

int sync(const char*, int only_data, fuse_file_info* info) {
  if (!hang(FuseOperation::sync)) return -EINTR;
  if (const int error = injected(FuseOperation::sync)) return error;
  return result(only_data != 0 ? ::fdatasync(file_of(info)) : ::fsync(file_of(info)));
}

int sync_folder(const char*, int only_data, fuse_file_info* info) {
  if (!hang(FuseOperation::sync)) return -EINTR;
  if (const int error = injected(FuseOperation::sync)) return error;
  return result(only_data != 0 ? ::fdatasync(file_of(info)) : ::fsync(file_of(info)));
}

int take_space(const char*, int mode, off_t offset, off_t bytes, fuse_file_info* info) {
  if (const int error = injected(FuseOperation::space)) return error;
  return result(::fallocate(file_of(info), mode, offset, bytes));
}

int truncate(const char* path, off_t bytes, fuse_file_info* info) {
  if (info != nullptr) return result(::ftruncate(file_of(info), bytes));
  const int file = ::openat(backing, relative(path), O_WRONLY | O_CLOEXEC);
  if (file < 0) return -errno;
  const int outcome = result(::ftruncate(file, bytes));
  ::close(file);
  return outcome;
}

int make_folder(const char* path, mode_t mode) {
  if (const int error = injected(FuseOperation::name)) return error;
  return result(::mkdirat(backing, relative(path), mode));
}

int remove_file(const char* path) {
  if (const int error = injected(FuseOperation::name)) return error;
  return result(::unlinkat(backing, relative(path), 0));
}

int remove_folder(const char* path) {
  if (const int error = injected(FuseOperation::name)) return error;
  return result(::unlinkat(backing, relative(path), AT_REMOVEDIR));
}

int rename(const char* from, const char* to, unsigned int flags) {
  if (const int error = injected(FuseOperation::name)) return error;
  return result(::renameat2(backing, relative(from), backing, relative(to), flags));
}

int link(const char* from, const char* to) {
  if (const int error = injected(FuseOperation::name)) return error;
  return result(::linkat(backing, relative(from), backing, relative(to), 0));
}

int change_mode(const char* path, mode_t mode, fuse_file_info*) {
  return result(::fchmodat(backing, relative(path), mode, 0));
}

int file_system(const char*, struct statvfs* status) {
  return result(::fstatvfs(backing, status));
}

int open_folder(const char* path, fuse_file_info* info) {
  const int file = ::openat(backing, relative(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return -errno;
  info->fh = static_cast<uint64_t>(file);
  return 0;
}

int read_folder(const char*, void* buffer, fuse_fill_dir_t fill, off_t, fuse_file_info* info,
                fuse_readdir_flags) {
  DIR* folder = ::fdopendir(::openat(file_of(info), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder == nullptr) return -errno;
  while (const dirent* entry = ::readdir(folder))
    fill(buffer, entry->d_name, nullptr, 0, fuse_fill_dir_flags{});
  ::closedir(folder);
  return 0;
}

int run(const char* program, const char* mountpoint) {
  fuse_operations operations{};
  operations.init = init;
  operations.getattr = get_attributes;
  operations.open = open;
  operations.create = create;
  operations.release = release;
  operations.read = read;
  operations.write = write;
  operations.fsync = sync;
  operations.fallocate = take_space;
  operations.truncate = truncate;
  operations.mkdir = make_folder;
  operations.unlink = remove_file;
  operations.rmdir = remove_folder;
  operations.rename = rename;
  operations.link = link;
  operations.chmod = change_mode;
  operations.statfs = file_system;
  operations.opendir = open_folder;
  operations.releasedir = release;
  operations.readdir = read_folder;
  operations.fsyncdir = sync_folder;
  std::array<std::string, 5> words = {program, "-f", "-o", "default_permissions,fsname=overspill-faults",
                                      mountpoint};
  std::array<char*, words.size()> arguments{};
  std::ranges::transform(words, arguments.begin(), [](std::string& word) { return word.data(); });
  return fuse_main(static_cast<int>(arguments.size()), arguments.data(), &operations, nullptr);
}

}  // namespace
}  // namespace overspill::testing

int main(int argc, char** argv) {
  using namespace overspill::testing;
  if (argc != 4) return 2;
  backing = ::open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (backing < 0) {
    std::perror(argv[1]);
    return 1;
  }
  faults = map_fuse_faults(std::stoi(argv[2]));
  ::umask(0);
  return run(argv[0], argv[3]);
}
