// Weights in eight bits, which loses some of them: a weight is an integer from -127 to 127 times a scale, one
// for each 32 columns of a row.
//
// A panel, for each 32 columns (the last may be fewer, an even number): 64 scales in bf16, one a row, and the
// integers, column after column: 8.5 bits a weight.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "inference/kernels/panel.h"

namespace overspill::inference {

inline constexpr int64_t kScaledColumns = 32;
inline constexpr int64_t kScalesBytes = 2 * kPanelRows;

/// Where the scales of the group that column `column` is in lie in a panel; the integers follow.
constexpr int64_t int8_group_at(int64_t column) {
  return column / kScaledColumns * (kScalesBytes + kScaledColumns * kPanelRows);
}

constexpr int64_t int8_panel_bytes(int64_t columns) {
  const int64_t even = round_up(columns, 2);
  return round_up(even, kScaledColumns) / kScaledColumns * kScalesBytes + even * kPanelRows;
}

/// Rounds a panel of bf16 or fp32 (kernels/panel.h) to the nearest of such weights. A scale is the bf16 at or
/// above a 127th of the largest magnitude. False, with `to` in no defined state, where a weight is not
/// finite.
bool quantise_panel(const uint16_t* panel, int64_t columns, std::byte* to);
bool quantise_panel(const float* panel, int64_t columns, std::byte* to);

/// Row `row` of a panel: `columns` elements, each its integer times its scale.
void dequantise_row(const std::byte* panel, int64_t columns, int64_t row, float* to);

}  // namespace overspill::inference
