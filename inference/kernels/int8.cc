#include "inference/kernels/int8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace overspill::inference {
namespace {

constexpr float kLargest = 127;

float widened(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// Not below x, which is not negative, so that no integer is larger than it may be.
uint16_t narrowed_up(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0xFFFFu) >> 16);
}

/// To nearest even, for magnitudes up to 127: adding 1.5 * 2^23 leaves the integer in the low bits, without
/// the call of the C library that took half of the time.
int8_t rounded(float x) {
  return static_cast<int8_t>(std::bit_cast<uint32_t>(x + 12582912.0f) & 0xFFu);
}

/// weight(column, row), for columns [0, columns).
template <class Weight>
bool quantise(int64_t columns, std::byte* to, Weight weight) {
  const int64_t even = round_up(columns, 2);
  for (int64_t first = 0; first < even; first += kScaledColumns) {
    const int64_t end = std::min(columns, first + kScaledColumns);
    std::byte* const group = to + int8_group_at(first);
    auto* const integers = reinterpret_cast<int8_t*>(group + kScalesBytes);
    for (int64_t r = 0; r < kPanelRows; ++r) {
      float largest = 0;
      for (int64_t c = first; c < end; ++c) {
        const float magnitude = std::abs(weight(c, r));
        if (!std::isfinite(magnitude)) return false;
        largest = std::max(largest, magnitude);
      }
      const uint16_t scale = narrowed_up(largest / kLargest);
      std::memcpy(group + 2 * r, &scale, sizeof scale);
      const float step = scale == 0 ? 1 : widened(scale);
      for (int64_t c = first; c < end; ++c)
        integers[(c - first) * kPanelRows + r] = rounded(weight(c, r) / step);
    }
    if (end < std::min(even, first + kScaledColumns))
      std::memset(integers + (end - first) * kPanelRows, 0, kPanelRows);
  }
  return true;
}

}  // namespace

bool quantise_panel(const uint16_t* panel, int64_t columns, std::byte* to) {
  return quantise(columns, to, [&](int64_t c, int64_t r) {
    return widened(panel[c / 2 * 2 * kPanelRows + 2 * r + c % 2]);
  });
}

bool quantise_panel(const float* panel, int64_t columns, std::byte* to) {
  return quantise(columns, to, [&](int64_t c, int64_t r) { return panel[c * kPanelRows + r]; });
}

void dequantise_row(const std::byte* panel, int64_t columns, int64_t row, float* to) {
  for (int64_t c = 0; c < columns; ++c) {
    const std::byte* const group = panel + int8_group_at(c);
    uint16_t scale;
    std::memcpy(&scale, group + 2 * row, sizeof scale);
    const auto* const integers = reinterpret_cast<const int8_t*>(group + kScalesBytes);
    to[c] = widened(scale) * static_cast<float>(integers[c % kScaledColumns * kPanelRows + row]);
  }
}

}  // namespace overspill::inference
