// What happens to gradients before the update: accumulation, conversion, squares with finiteness. Bit-equal
// on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu_optim/half.h"

namespace overspill::optim {

/// Sum of squares in double precision, by a tree whose shape depends on the count alone; and whether every
/// element is finite. An element that is inf or NaN contributes to `finite` only.
///
/// The tree, the same on every instruction set and device: the array is cut into blocks of 4096 elements, the
/// last one shorter. In a block, 32 lanes start at +0 and lane j adds the squares (exact in double) of
/// elements j, j + 32, j + 64, ... in order. The lanes are folded: lane j += lane j + 16 for j < 16, then 8,
/// 4, 2, 1. The block sums are added in order to a total that starts at +0.
struct Squares {
  double sum = 0;
  bool finite = true;
};
Squares squares(std::span<const uint16_t> bf16);
Squares squares(std::span<const Fp16> fp16);
Squares squares(std::span<const float> fp32);

/// to = from, or to += from. bf16 and fp16 sums are rounded to nearest even after an fp32 addition, as torch
/// accumulates. Sizes must match.
void widen(std::span<const uint16_t> bf16, std::span<float> fp32);
void widen(std::span<const Fp16> fp16, std::span<float> fp32);
void narrow(std::span<const float> fp32, std::span<uint16_t> bf16);  // nearest even, NaN stays NaN
void narrow(std::span<const float> fp32, std::span<Fp16> fp16);
void accumulate(std::span<const uint16_t> from, std::span<uint16_t> to);
void accumulate(std::span<const uint16_t> from, std::span<float> to);
void accumulate(std::span<const Fp16> from, std::span<Fp16> to);
void accumulate(std::span<const Fp16> from, std::span<float> to);
void accumulate(std::span<const float> from, std::span<float> to);
/// to = from, bytes that nobody reads soon: where the processor can, a large array is written past the
/// caches, whose lines are then not read first. Sizes must match; the arrays do not overlap.
void copy_for_later(std::span<const std::byte> from, std::span<std::byte> to);
/// to *= factor
void scale(std::span<float> to, float factor);

}  // namespace overspill::optim
