// Frozen weights in 4 or 8 bits. Blocks of 64 values in a row are divided by their largest magnitude, and
// each quotient becomes the nearest one of a table: nf4 has 16, the quantiles of a normal distribution
// (QLoRA, Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, section 3 and appendix E; bitsandbytes'
// numbers), int8 has k / 127 for k = -127 to 127 (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861,
// blockwise).
//
// The largest magnitude is one of the values, so it is kept in their own type and loses nothing: 4.25 bits a
// bf16 value in nf4, 8.25 in int8; 4.5 and 8.5 an fp32 value. A packed array of n values in B = ceil(n / 64)
// blocks is
//
//   codes       B * 32 bytes in nf4, the first of two values in the upper half of a byte; B * 64 in int8
//   magnitudes  B elements
//
// with zeros for the values that the last block lacks. What unpack() gives packs to the same bytes again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "cpu_optim/format.h"

namespace overspill::optim {

enum class Packing : uint8_t { nf4, int8 };
Packing packing_named(std::string_view name);  // throws std::invalid_argument

inline constexpr int64_t kPackingBlock = 64;

/// Of `elements` values of that type, bf16 or fp32.
int64_t packed_bytes(Packing packing, Element element, int64_t elements);

/// Sizes are checked: whole elements, and packed_bytes() of them. The arrays are aligned to their elements.
/// Throws std::invalid_argument for a value that is inf or NaN.
void pack(Packing packing, Element element, std::span<const std::byte> values, std::span<std::byte> packed);
/// Each value is the table's times the magnitude, in fp32, rounded to nearest even. Codes and magnitudes may
/// be any bits.
void unpack(Packing packing, Element element, std::span<const std::byte> packed, std::span<std::byte> values);

}  // namespace overspill::optim
