// The bits of a float, for the references; shares nothing with the kernels.
#pragma once

#include <bit>
#include <cstdint>

namespace overspill::reference {

inline float as_float(uint32_t bits) {
  return std::bit_cast<float>(bits);
}
inline uint32_t as_bits(float x) {
  return std::bit_cast<uint32_t>(x);
}

}  // namespace overspill::reference
