// Pages of host memory outside malloc's heap, never copied by fork (MADV_DONTFORK).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace overspill::kernels {

/// What the kernel is asked for. Huge pages halve the time of a product that streams through memory; small
/// ones cost nothing where only a little of each 2 MiB is ever used.
enum class PageSize : uint8_t { small, huge };

/// Anonymous memory. Zero-filled, aligned to 4096 bytes; huge pages to 2 MiB if it is as long, so that all of
/// it can lie in them. A page takes memory once it is touched. Move-only.
class HostPages {
 public:
  HostPages() = default;
  explicit HostPages(int64_t bytes, PageSize size = PageSize::huge);  // throws std::bad_alloc
  HostPages(HostPages&& other) noexcept;
  HostPages& operator=(HostPages&& other) noexcept;
  ~HostPages();
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, static_cast<size_t>(bytes_)}; }

  /// What `bytes` take: whole pages of 4096 bytes. Throws std::bad_alloc where no machine has them.
  static int64_t mapped_bytes(int64_t bytes);

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

/// Makes the kernel give pages to all of `memory`, which need not begin or end at a page, as if each had been
/// written to; what is there stays. One thread that goes ahead of those that write takes half the time of
/// many that meet missing pages at once. Does nothing on kernels before 5.14. Reports no error where memory
/// runs out: the thread that writes there meets it.
void populate(std::span<std::byte> memory) noexcept;

}  // namespace overspill::kernels
