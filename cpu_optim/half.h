// Two-byte elements. bf16 is held as its bits in uint16_t everywhere; fp16 has a type of its own, so that the
// two are never taken for one another.
#pragma once

#include <cstdint>

namespace overspill::optim {

/// IEEE binary16, its bits.
struct Fp16 {
  uint16_t bits;
  bool operator==(const Fp16&) const = default;
};

}  // namespace overspill::optim
