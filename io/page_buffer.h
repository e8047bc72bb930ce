// Memory for reads and writes past the page cache.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

#include "io/store.h"

namespace overspill::io {

/// Aligned for O_DIRECT. It grows to the most that was asked for. Not from the heap, which would keep what
/// was outgrown, in every thread's part of it.
class PageBuffer {
 public:
  PageBuffer() = default;
  PageBuffer(const PageBuffer&) = delete;
  PageBuffer& operator=(const PageBuffer&) = delete;
  ~PageBuffer() { give_back(); }

  /// What was in it is gone where it has to grow. Throws std::bad_alloc.
  std::span<std::byte> first(int64_t bytes) {
    if (bytes > room_) {
      give_back();
      const int64_t room = round_up_to_block(bytes);
      void* const mapped = ::mmap(nullptr, static_cast<size_t>(room), PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      memory_ = static_cast<std::byte*>(mapped);
      room_ = room;
    }
    return {memory_, static_cast<size_t>(bytes)};
  }

 private:
  void give_back() {
    if (memory_ != nullptr) ::munmap(memory_, static_cast<size_t>(room_));
    memory_ = nullptr;
    room_ = 0;
  }

  std::byte* memory_ = nullptr;
  int64_t room_ = 0;
};

}  // namespace overspill::io
