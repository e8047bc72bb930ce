#include "engine/checkpoint/checkpoint_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>
#include <vector>

#include "io/checksum.h"
#include "io/error.h"
#include "io/files.h"
#include "io/part_folder.h"
#include "io/patient_read.h"

namespace overspill::engine {
namespace {

constexpr int64_t kBlockBytes = io::kChecksumBlockBytes;

constexpr const char* kUseAnother = "use another checkpoint, or restore this file";
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

void verify_block(const std::filesystem::path& folder, const FileRange& range, int64_t block,
                  std::span<const std::byte> bytes) {
  const uint64_t found = io::checksum_block(bytes);
  const uint64_t expected = range.block_checksums[block];
  if (found == expected) return;
  throw CheckpointError(
      fmt::format("{}: {} bytes at {} are corrupt: checksum {:016x}, written as {:016x}; {}",
                  (folder / range.file).string(), bytes.size(), range.offset + block * kBlockBytes, found,
                  expected, kUseAnother));
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

void CheckpointFile::drop_cached() const {
  // Its answer is no promise, so a refusal changes nothing.
  static_cast<void>(::posix_fadvise(file_, 0, 0, POSIX_FADV_DONTNEED));
}

void CheckpointFile::read_at(std::span<std::byte> to, int64_t offset) const {
  while (!to.empty()) {
    const ssize_t got = io::read_some(file_, to, offset, path_);
    if (got < 0) fail(path_, fmt::format("cannot be read at {}", offset).c_str(), errno, kUseAnother);
    if (got == 0) {
      throw CheckpointError(fmt::format("{}: ends at {}, {} bytes too early; {}", path_.string(), offset,
                                        to.size(), kUseAnother));
    }
    to = to.subspan(got);
    offset += got;
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

void read_range(const std::filesystem::path& folder, const FileRange& range, std::span<std::byte> to) {
  read_range_part(folder, range, 0, to);
}

void read_range_part(const std::filesystem::path& folder, const FileRange& range, int64_t begin,
                     std::span<std::byte> to) {
  const auto count = static_cast<int64_t>(to.size());
  if (begin < 0 || begin > range.bytes || count > range.bytes - begin ||
      static_cast<int64_t>(range.block_checksums.size()) != (range.bytes + kBlockBytes - 1) / kBlockBytes) {
    throw CheckpointError(fmt::format(
        "{}: {} bytes at {} were asked for of a range of {} bytes and {} checksums; this is a mistake "
        "in the program",
        (folder / range.file).string(), count, begin, range.bytes, range.block_checksums.size()));
  }
  const CheckpointFile file = CheckpointFile::open(path_of(folder, range.file));
  std::vector<std::byte> scratch;
  for (int64_t at = begin; at < begin + count;) {
    const int64_t block = at / kBlockBytes;
    const int64_t block_begin = block * kBlockBytes;
    const int64_t block_bytes = std::min(kBlockBytes, range.bytes - block_begin);
    const int64_t wanted = std::min(block_begin + block_bytes, begin + count) - at;
    const std::span<std::byte> target = to.subspan(at - begin, wanted);
    if (wanted == block_bytes) {
      file.read_at(target, range.offset + block_begin);
      verify_block(folder, range, block, target);
    } else {  // a part of a block: only the whole has a checksum
      scratch.resize(block_bytes);
      file.read_at(scratch, range.offset + block_begin);
      verify_block(folder, range, block, scratch);
      std::memcpy(target.data(), scratch.data() + (at - block_begin), target.size());
    }
    at += wanted;
  }
}

}  // namespace overspill::engine
