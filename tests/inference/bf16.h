// bf16 as bits.
#pragma once

#include <bit>
#include <cstdint>

namespace overspill::inference {

inline float bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
/// Cuts off what does not fit.
inline uint16_t to_bf16(float x) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
}

}  // namespace overspill::inference
