// The split master (docs/update.md): an fp32 weight kept as its bf16 part `hi`, which forward uses, and `lo`,
// what is missing to the exact value.
#pragma once

#include <bit>
#include <cstdint>

namespace overspill::optim {

/// The bf16 weight, rounded half up. Worked example: 0x3F808000 (1.00390625, a tie) gives hi 0x3F81, lo
/// -32768; half to even would give hi 0x3F80 and a residue of +32768, which int16 cannot hold.
constexpr uint16_t split_hi(uint32_t bits) {
  return static_cast<uint16_t>((bits + 0x8000u) >> 16);
}

/// In [-32768, 32767]. Addition is modulo 2^32, so the pair is exact for every bit pattern, beyond the
/// largest finite bf16 too.
constexpr int16_t split_lo(uint32_t bits) {
  return static_cast<int16_t>(static_cast<int32_t>(bits - (static_cast<uint32_t>(split_hi(bits)) << 16)));
}

constexpr uint32_t join_split(uint16_t hi, int16_t lo) {
  return (static_cast<uint32_t>(hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo));
}

}  // namespace overspill::optim
