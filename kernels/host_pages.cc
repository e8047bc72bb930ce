#include "kernels/host_pages.h"

#include <sys/mman.h>

#include <limits>
#include <new>
#include <utility>

namespace overspill::kernels {
namespace {

constexpr int64_t kSmallBytes = 4096;
constexpr int64_t kHugeBytes = 2 << 20;

/// Memory that begins at a multiple of `alignment`.
std::byte* map_aligned(int64_t bytes, int64_t alignment) {
  const int64_t slack = alignment - kSmallBytes;
  void* const mapped = ::mmap(nullptr, static_cast<size_t>(bytes + slack), PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const all = static_cast<std::byte*>(mapped);
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(all) % static_cast<uint64_t>(alignment));
  const int64_t before = past == 0 ? 0 : alignment - past;
  if (before > 0) ::munmap(all, static_cast<size_t>(before));
  if (before < slack) ::munmap(all + before + bytes, static_cast<size_t>(slack - before));
  return all + before;
}

}  // namespace

int64_t HostPages::mapped_bytes(int64_t bytes) {
  if (bytes < 0 || bytes > std::numeric_limits<int64_t>::max() - 2 * kHugeBytes) throw std::bad_alloc();
  return (bytes + kSmallBytes - 1) / kSmallBytes * kSmallBytes;
}

HostPages::HostPages(int64_t bytes, PageSize size) : bytes_(bytes) {
  const int64_t mapped = mapped_bytes(bytes);
  if (mapped == 0) return;
  const bool huge = size == PageSize::huge;
  data_ = map_aligned(mapped, huge && mapped >= kHugeBytes ? kHugeBytes : kSmallBytes);
  // Huge pages are a wish (some kernels have none, some give them unasked); not being copied by fork is a
  // promise.
  ::madvise(data_, static_cast<size_t>(mapped), huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  if (::madvise(data_, static_cast<size_t>(mapped), MADV_DONTFORK) != 0) {
    ::munmap(data_, static_cast<size_t>(mapped));
    throw std::bad_alloc();
  }
}

HostPages::HostPages(HostPages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

HostPages& HostPages::operator=(HostPages&& other) noexcept {
  HostPages taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(bytes_, taken.bytes_);
  return *this;
}

HostPages::~HostPages() {
  if (data_ != nullptr) ::munmap(data_, static_cast<size_t>(mapped_bytes(bytes_)));
}

void populate([[maybe_unused]] std::span<std::byte> memory) noexcept {
#ifdef MADV_POPULATE_WRITE
  if (memory.empty()) return;
  const auto begin = reinterpret_cast<uintptr_t>(memory.data());
  const size_t before = begin % kSmallBytes;
  ::madvise(memory.data() - before, memory.size() + before, MADV_POPULATE_WRITE);  // rounds the length up
#endif
}

}  // namespace overspill::kernels
