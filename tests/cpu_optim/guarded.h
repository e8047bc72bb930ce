// Arrays that notice when something outside them is touched.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <vector>

namespace overspill::optim {

/// `values`, starting `offset` elements after a 64-byte boundary, with 64 bytes or more of sentinels on both
/// sides.
template <class T>
class Guarded {
 public:
  Guarded(std::span<const T> values, int offset) : count_(values.size()) {
    storage_.resize(count_ + static_cast<size_t>(offset) + 4 * kGuard, std::bit_cast<T>(kSentinel));
    const auto past = reinterpret_cast<uintptr_t>(storage_.data()) % 64;
    start_ = kGuard + (64 - past) % 64 / sizeof(T) + static_cast<size_t>(offset);
    std::copy(values.begin(), values.end(), storage_.begin() + static_cast<std::ptrdiff_t>(start_));
  }
  T* data() { return storage_.data() + start_; }
  std::span<T> span() { return {data(), count_}; }
  /// True while no sentinel has changed.
  bool intact() const {
    const T sentinel = std::bit_cast<T>(kSentinel);
    for (size_t i = 0; i < storage_.size(); ++i) {
      const bool outside = i < start_ || i >= start_ + count_;
      if (outside && std::memcmp(&storage_[i], &sentinel, sizeof(T)) != 0) return false;
    }
    return true;
  }

 private:
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  static constexpr Bits kSentinel = static_cast<Bits>(0xA5C3A5C3u);
  static constexpr size_t kGuard = 64 / sizeof(T);
  size_t count_;
  size_t start_;
  std::vector<T> storage_;
};

/// Bytes that start `offset` bytes after a 64-byte boundary, with 64 bytes or more of sentinels on both
/// sides.
class GuardedBytes {
 public:
  GuardedBytes(std::span<const std::byte> values, size_t offset)
      : count_(values.size()), storage_(count_ + offset + 4 * kGuard, kSentinel) {
    start_ = kGuard + (64 - reinterpret_cast<uintptr_t>(storage_.data()) % 64) % 64 + offset;
    std::copy(values.begin(), values.end(), storage_.begin() + static_cast<std::ptrdiff_t>(start_));
  }
  std::byte* data() { return storage_.data() + start_; }
  std::span<const std::byte> span() const { return {storage_.data() + start_, count_}; }
  bool intact() const {
    const auto is_sentinel = [](std::byte b) { return b == kSentinel; };
    const auto begin = storage_.begin() + static_cast<std::ptrdiff_t>(start_);
    return std::all_of(storage_.begin(), begin, is_sentinel) &&
           std::all_of(begin + static_cast<std::ptrdiff_t>(count_), storage_.end(), is_sentinel);
  }

 private:
  static constexpr std::byte kSentinel{0xA5};
  static constexpr size_t kGuard = 64;
  size_t count_;
  std::vector<std::byte> storage_;
  size_t start_;
};

/// `values`, ending where a page ends after which no memory is readable: reading past the end is a crash.
template <class T>
class AtPageEnd {
 public:
  explicit AtPageEnd(std::span<const T> values) {
    pages_ = static_cast<std::byte*>(
        mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (pages_ == MAP_FAILED || mprotect(pages_ + kPage, kPage, PROT_NONE) != 0) throw std::bad_alloc();
    data_ = reinterpret_cast<T*>(pages_ + kPage - values.size_bytes());
    std::copy(values.begin(), values.end(), data_);
  }
  ~AtPageEnd() { munmap(pages_, 2 * kPage); }
  AtPageEnd(const AtPageEnd&) = delete;
  AtPageEnd& operator=(const AtPageEnd&) = delete;
  T* data() { return data_; }

 private:
  static constexpr size_t kPage = 4096;
  std::byte* pages_;
  T* data_;
};

/// The same bits, or both NaN: which NaN comes out of an operation on NaNs is the instruction's choice.
inline bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

}  // namespace overspill::optim
