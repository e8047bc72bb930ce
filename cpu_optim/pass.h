// What a front end hands to a kernel: sizes checked, pointers raw, because what the kernels' files
// instantiate must not be shared with files that are compiled for another instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace overspill::optim {

/// The random bits of stochastic rounding, by (seed, step, element). Element `i` of the piece, of unit index
/// k = index + i (its lower 32 bits), draws
///
///     x = k ^ key0;  x ^= x >> 16;  x *= 0x7feb352d;  x += key1;  x ^= x >> 15;  x *= 0x846ca68b;
///     x ^= x >> 16                                                      (modulo 2^32)
///
/// to which the step adds a word that moves each field of b bits on by the upper b bits of `weyl` = step *
/// 0x9E3779B9 (a carry goes into the next field). docs/update.md says why this is enough.
struct Noise {
  uint32_t key0 = 0, key1 = 0;
  uint32_t weyl = 0;
  uint32_t index = 0;
};
Noise make_noise(uint64_t seed, int64_t index, int64_t step);

/// Into which cache memory is asked for ahead of its use: cores differ (docs/update.md). The numbers are
/// __builtin_prefetch's.
enum class Cache : uint8_t { second_level = 2, first_level = 3 };

struct Pass {
  std::byte* const* components;
  const void* gradient;  // of the piece's first element
  int64_t elements;      // of the piece
  int64_t begin, end;    // the range
  const void* factors;   // of the optimizer's own type
  float grad_scale;
  Noise noise;
  Cache prefetch = Cache::first_level;
};

}  // namespace overspill::optim
