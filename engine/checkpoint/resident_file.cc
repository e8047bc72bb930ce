#include "engine/checkpoint/resident_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <span>

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

ResidentFile::~ResidentFile() {
  if (fd_ >= 0) ::close(fd_);
}

FileRange ResidentFile::append(std::span<const std::byte> data) {
  const int64_t bytes = std::ssize(data);
  if (fd_ < 0) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd_ < 0) fail(io::Operation::open, path_, 0, bytes);
  }
  FileRange range{kResidentFile, end_, bytes, io::block_checksums(data)};
  write(data.data(), bytes);
  return range;
}

void ResidentFile::write(const std::byte* data, int64_t bytes) {
  io::StallWatch::Progress progress(watch_, io::Operation::write, path_.string());
  while (bytes > 0) {
    const ssize_t written = ::pwrite(fd_, data, static_cast<size_t>(bytes), end_);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail(io::Operation::write, path_, end_, bytes);
    data += written;
    end_ += written;
    bytes -= written;
    progress.moved();
  }
}

void ResidentFile::finish() {
  if (fd_ < 0) return;
  errno = io::sync_data(watch_, fd_, path_.string());
  if (errno != 0) fail(io::Operation::sync, path_, 0, end_);
}

}  // namespace overspill::engine
