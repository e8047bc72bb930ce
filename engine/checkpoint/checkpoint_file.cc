#include "engine/checkpoint/checkpoint_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "io/direct_alignment.h"
#include "io/error.h"
#include "io/files.h"
#include "io/part_folder.h"
#include "io/patient_read.h"

namespace overspill::engine {
namespace {

constexpr const char* kUseAnother = kUseAnotherCheckpoint;
constexpr const char* kMakeRoom = "free space or choose another folder";
constexpr const char* kCheckDisk = "check the disk (dmesg, smartctl) or choose another folder";
constexpr const char* kFreeMemory = "free memory on this machine, or raise the limit of its container";

[[noreturn]] void fail(const std::filesystem::path& path, const char* what, int os_error,
                       const char* way_out) {
  const io::ErrorKind kind = io::kind_of_errno(os_error);
  if (way_out == kMakeRoom && kind == io::ErrorKind::device) way_out = kCheckDisk;
  if (kind == io::ErrorKind::no_memory) way_out = kFreeMemory;
  throw CheckpointError(
      fmt::format("{}: {}: {}; {}", path.string(), what, std::generic_category().message(os_error), way_out));
}

}  // namespace

CheckpointFile CheckpointFile::open(const std::filesystem::path& path) {
  // O_NONBLOCK: a named pipe in place of the file must not hang the reader.
  const int file = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) {
    if (errno == ELOOP)
      fail(path, "a symbolic link, which is not followed", errno, "put the file itself there");
    fail(path, "cannot be opened", errno, kUseAnother);
  }
  CheckpointFile opened(path, file);
  struct stat status = {};
  if (::fstat(file, &status) != 0) fail(path, "cannot be examined", errno, kUseAnother);
  if (!S_ISREG(status.st_mode))
    throw CheckpointError(fmt::format("{}: not a regular file; {}", path.string(), kUseAnother));
  return opened;
}

CheckpointFile CheckpointFile::create(const std::filesystem::path& path, int mode) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
  if (file < 0) fail(path, "cannot be created", errno, kMakeRoom);
  return CheckpointFile(path, file);
}

CheckpointFile::CheckpointFile(CheckpointFile&& other) noexcept
    : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)) {}

CheckpointFile::~CheckpointFile() {
  if (file_ >= 0) ::close(file_);
}

int64_t CheckpointFile::bytes() const {
  struct stat status = {};
  if (::fstat(file_, &status) != 0) fail(path_, "cannot be examined", errno, kUseAnother);
  return status.st_size;
}

void CheckpointFile::preallocate(int64_t bytes) const {
  if (bytes > 0) static_cast<void>(::fallocate(file_, 0, 0, bytes));
}

void CheckpointFile::drop_cached() const {
  // Its answer is no promise, so a refusal changes nothing.
  static_cast<void>(::posix_fadvise(file_, 0, 0, POSIX_FADV_DONTNEED));
}

void CheckpointFile::pass_cache() const {
  if (const auto asks = io::direct_alignment_of(file_); asks && !io::refusal_of(*asks).empty()) return;
  const int flags = ::fcntl(file_, F_GETFL);
  // A file system that cannot refuses, and the page cache stays in use.
  if (flags >= 0) static_cast<void>(::fcntl(file_, F_SETFL, flags | O_DIRECT));
}

/// For one that took O_DIRECT and refuses what goes past the cache.
void CheckpointFile::use_cache() const {
  const int flags = ::fcntl(file_, F_GETFL);
  if (flags >= 0) static_cast<void>(::fcntl(file_, F_SETFL, flags & ~O_DIRECT));
}

void CheckpointFile::read_at(std::span<std::byte> to, int64_t offset) const {
  read_pages(to, offset, std::ssize(to));
}

void CheckpointFile::read_pages(std::span<std::byte> to, int64_t offset, int64_t wanted) const {
  for (bool cached = false; wanted > 0;) {
    const ssize_t got = io::read_some(file_, to, offset, path_);
    if (got < 0 && errno == EINVAL && !std::exchange(cached, true)) {
      use_cache();
      continue;
    }
    if (got < 0) fail(path_, fmt::format("cannot be read at {}", offset).c_str(), errno, kUseAnother);
    if (got == 0) {
      throw CheckpointError(
          fmt::format("{}: ends at {}, {} bytes too early; {}", path_.string(), offset, wanted, kUseAnother));
    }
    to = to.subspan(got);
    offset += got;
    wanted -= got;
  }
}

void CheckpointFile::write(std::span<const std::byte> from) {
  while (!from.empty()) {
    const ssize_t wrote = ::write(file_, from.data(), from.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) fail(path_, "cannot be written", wrote < 0 ? errno : ENOSPC, kMakeRoom);
    from = from.subspan(wrote);
  }
}

void CheckpointFile::write_pages(std::span<const std::byte> from, int64_t offset) const {
  const int64_t begin = offset, bytes = std::ssize(from);
  for (bool cached = false; !from.empty();) {
    const ssize_t wrote = ::pwrite(file_, from.data(), from.size(), offset);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0 && errno == EINVAL && !std::exchange(cached, true)) {
      use_cache();
      continue;
    }
    if (wrote <= 0) fail(path_, "cannot be written", wrote < 0 ? errno : ENOSPC, kMakeRoom);
    from = from.subspan(wrote);
    offset += wrote;
  }
  // What went to the cache after all goes on to the disk. The answer is no promise: sync() asks for that.
  static_cast<void>(::sync_file_range(file_, begin, bytes, SYNC_FILE_RANGE_WRITE));
}

void CheckpointFile::cut(int64_t bytes) const {
  if (::ftruncate(file_, bytes) != 0) fail(path_, "cannot be cut to its length", errno, kMakeRoom);
}

void CheckpointFile::sync(io::StallWatch* watch) {
  errno = io::sync_file(watch, file_, path_.string());
  if (errno != 0) fail(path_, "cannot be made durable", errno, kMakeRoom);
}

bool is_in_part(std::string_view file) {
  return file.find('/') != std::string_view::npos;
}

std::filesystem::path path_of(const std::filesystem::path& folder, std::string_view file) {
  const size_t slash = file.find('/');
  if (slash == std::string_view::npos) return folder / file;
  const std::string id(file.substr(0, slash));
  const std::filesystem::path part = io::part_path(folder, id);
  if (!part.empty() && io::is_part({id, part})) return part / file.substr(slash + 1);
  const std::filesystem::path name = folder / fmt::format("{}{}{}", io::kPartPrefix, id, io::kPartSuffix);
  throw CheckpointError(
      part.empty()
          ? fmt::format("{}: it says where a part of the checkpoint lies, and cannot be read; restore it",
                        name.string())
          : fmt::format("{}: a part of the checkpoint {} lies there, and that is not here: mount its disk, "
                        "or, where that is mounted elsewhere, write the folder's path into {}",
                        part.string(), folder.string(), name.string()));
}

void make_folder(const std::filesystem::path& folder) {
  if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST)
    fail(folder, "cannot be created", errno, kMakeRoom);
}

void sync_folder(const std::filesystem::path& folder, io::StallWatch* watch) {
  try {
    io::sync_folder(folder, watch);
  } catch (const io::StoreError& error) {
    if (error.error().kind == io::ErrorKind::stalled) throw;
    const bool opens = error.error().operation == io::Operation::open;
    fail(folder, opens ? "cannot be opened" : "cannot be made durable", error.error().os_error,
         opens ? "check the folder's permissions" : kMakeRoom);
  }
}

void rename_file(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(to, "cannot be put in place", errno, kMakeRoom);
}

}  // namespace overspill::engine
