#include "engine/checkpoint/resident_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <span>
#include <utility>

#include "io/checksum.h"
#include "io/error.h"

namespace overspill::engine {
namespace {

[[noreturn]] void fail(io::Operation operation, const std::filesystem::path& path, int64_t offset,
                       int64_t bytes) {
  throw io::StoreError(
      {io::kind_of_errno(errno), operation, errno, path.string(), offset, bytes, "writing a checkpoint"});
}

}  // namespace

ResidentFile::ResidentFile(const std::filesystem::path& folder, io::StallWatch* watch)
    : path_(folder / kResidentFile), watch_(watch) {}

void ResidentFile::open() {
  if (fd_) return;
  fd_ = io::UniqueFd(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd_) fail(io::Operation::open, path_, 0, 0);
}

FileRange ResidentFile::append(std::span<const std::byte> data) {
  const int64_t bytes = std::ssize(data);
  FileRange range{kResidentFile, 0, bytes, {}};
  int fd = -1;
  {
    const MutexLock lock(mutex_);
    open();
    fd = fd_.get();
    range.offset = std::exchange(end_, end_ + bytes);
  }
  range.block_checksums = io::block_checksums(data);
  write(fd, data.data(), bytes, range.offset);
  return range;
}

void ResidentFile::write(int fd, const std::byte* data, int64_t bytes, int64_t offset) {
  io::StallWatch::Progress progress(watch_, io::Operation::write, path_.string());
  while (bytes > 0) {
    const ssize_t written = ::pwrite(fd, data, static_cast<size_t>(bytes), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(io::Operation::write, path_, offset, bytes);
    data += written;
    offset += written;
    bytes -= written;
    progress.moved();
  }
}

void ResidentFile::finish() {
  const MutexLock lock(mutex_);
  if (!fd_) return;
  errno = io::sync_data(watch_, fd_.get(), path_.string());
  if (errno != 0) fail(io::Operation::sync, path_, 0, end_);
}

}  // namespace overspill::engine
