// Loops that only read and write what gradients need: the limit that memory sets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace overspill::bench {

/// Over elements [begin, end), multiples of 64: reads 2 bytes of each, and writes `to` or changes it.
struct IntakeLimit {
  void (*write2)(const std::byte* from, std::byte* to, int64_t begin, int64_t end);
  void (*write4)(const std::byte* from, std::byte* to, int64_t begin, int64_t end);
  void (*change4)(const std::byte* from, std::byte* to, int64_t begin, int64_t end);
};

/// Those that this processor can run: plain stores, and some that pass the caches. Which are faster depends
/// on the machine: the faster count.
std::span<const IntakeLimit> intake_limits();

}  // namespace overspill::bench
