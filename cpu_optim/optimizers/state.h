// What an optimizer says of a state.
#pragma once

#include <cstdint>

// What a GPU computes too: the same source on both.
#ifdef __CUDACC__
#define OVERSPILL_HERE_AND_THERE __host__ __device__
#else
#define OVERSPILL_HERE_AND_THERE
#endif

namespace overspill::optim {

/// Formats of few bits treat the two differently: a sign costs a bit, and a sum of squares must not be
/// rounded to zero.
enum class Values { any, sum_of_squares };

struct StateSpec {
  const char* name;
  Values values;
};

/// x != 0, asked in a general register: the vector units are what updates are short of. (Always inline: each
/// instruction set has its own.)
OVERSPILL_HERE_AND_THERE __attribute__((always_inline)) inline bool nonzero(float x) {
  return __builtin_bit_cast(uint32_t, x) << 1 != 0;
}

}  // namespace overspill::optim
