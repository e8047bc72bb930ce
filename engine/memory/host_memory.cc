#include "engine/memory/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <new>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace overspill::engine {
namespace {

std::byte* map(void* at, int64_t bytes, int protection, int flags, int file) {
  void* data = ::mmap(at, static_cast<size_t>(bytes), protection, flags, file, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(data);
}

void unmap(std::byte* data, int64_t bytes) noexcept {
  if (data != nullptr && bytes > 0) ::munmap(data, static_cast<size_t>(bytes));
}

/// The process's one file of 0xFF. It grows with the largest window asked for and is never closed.
class NanFile {
 public:
  /// The file, at least `bytes` long. Thread-safe.
  int at_least(int64_t bytes) {
    const MutexLock lock(mutex_);
    if (file_ < 0) file_ = ::memfd_create("overspill-nan", MFD_CLOEXEC);
    if (file_ < 0) throw std::bad_alloc();
    const std::vector<std::byte> block(size_t{1} << 20, std::byte{0xFF});
    while (filled_bytes_ < bytes) {
      const ssize_t wrote = ::pwrite(file_, block.data(), block.size(), filled_bytes_);
      if (wrote <= 0) throw std::bad_alloc();
      filled_bytes_ += wrote;
    }
    return file_;
  }

 private:
  Mutex mutex_;
  int file_ GUARDED_BY(mutex_) = -1;
  int64_t filled_bytes_ GUARDED_BY(mutex_) = 0;
};

/// How much of a region one mapping covers. 2 MiB for all but the largest parameters; up to 64 MiB there,
/// because the kernel allows 65,530 mappings a process and 2 MiB each would end at 128 GiB of weights.
int64_t nan_window_bytes(int64_t bytes) {
  const auto sixteenth = std::bit_ceil(static_cast<uint64_t>(bytes / 16));
  return static_cast<int64_t>(std::clamp<uint64_t>(sixteenth, uint64_t{2} << 20, uint64_t{64} << 20));
}

}  // namespace

HostMemory::HostMemory(Budget& budget, int64_t bytes, const char* what)
    : reservation_(budget.reserve(bytes > 0 ? kernels::HostPages::mapped_bytes(bytes) : bytes, what)),
      pages_(bytes) {}

NanPages::NanPages(int64_t bytes) : bytes_(kernels::HostPages::mapped_bytes(bytes)) {
  if (bytes_ == 0) return;
  const int64_t window_bytes = nan_window_bytes(bytes_);
  static NanFile shared;
  const int file = shared.at_least(std::min(window_bytes, bytes_));
  // One reservation first, so that the windows laid over it cannot hit anything else. MAP_NORESERVE: private
  // and writable, yet hardly ever written, so it must not count against the machine's memory.
  data_ = map(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
  try {
    for (int64_t begin = 0; begin < bytes_; begin += window_bytes) {
      map(data_ + begin, std::min(window_bytes, bytes_ - begin), PROT_READ | PROT_WRITE,
          MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file);
    }
  } catch (...) {
    unmap(data_, bytes_);
    throw;
  }
}

NanPages::~NanPages() {
  unmap(data_, bytes_);
}

FilePages::FilePages(int file, int64_t bytes)
    : data_(map(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file)), bytes_(bytes) {}

FilePages::~FilePages() {
  unmap(data_, bytes_);
}

}  // namespace overspill::engine
