// What happens to gradients before the update: accumulation, conversion, squares with finiteness. Bit-equal on every instruction set.
#pragma once

#include <cstdint>
#include <span>

namespace overspill::optim {

/// Sum of squares in double precision, by a tree whose shape depends on the count alone; and whether every element is finite.
/// An element that is inf or NaN contributes to `finite` only.
struct Squares {
  double sum = 0;
  bool finite = true;
};
Squares squares(std::span<const uint16_t> bf16);
Squares squares(std::span<const float> fp32);

/// to = from, or to += from. bf16 sums are rounded to nearest even after an fp32 addition, as torch accumulates. Sizes must match.
void widen(std::span<const uint16_t> bf16, std::span<float> fp32);
void narrow(std::span<const float> fp32, std::span<uint16_t> bf16);  // nearest even, NaN stays NaN
void accumulate(std::span<const uint16_t> from, std::span<uint16_t> to);
void accumulate(std::span<const uint16_t> from, std::span<float> to);
void accumulate(std::span<const float> from, std::span<float> to);
/// to *= factor
void scale(std::span<float> to, float factor);

}  // namespace overspill::optim
