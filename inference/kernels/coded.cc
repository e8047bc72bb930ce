#include "inference/kernels/coded.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

namespace overspill::inference {
namespace {

constexpr int64_t kPair = 2 * kPanelRows;  // elements

/// The place of the low byte of each element of a pair.
constexpr std::array<uint8_t, kPair> kPlaces = [] {
  std::array<uint8_t, kPair> places{};
  for (int e = 0; e < kPair; ++e)
    places[static_cast<size_t>(e)] =
        static_cast<uint8_t>(e / 64 * 64 + e % 32 / 8 * 16 + e % 64 / 32 * 8 + e % 8);
  return places;
}();

/// The commonest high bytes of a panel, and the code of each.
struct Table {
  std::array<uint8_t, kCodes> values;
  std::array<uint8_t, 256> codes;  // kCodes: none

  Table(const uint16_t* panel, int64_t count) {
    std::array<std::array<uint32_t, 256>, 4>
        counts{};  // four, since equal neighbours would wait for each other
    for (int64_t i = 0; i < count; i += 4) {
      for (int64_t j = 0; j < 4; ++j) ++counts[static_cast<size_t>(j)][panel[i + j] >> 8];
    }
    for (size_t i = 0; i < 256; ++i) counts[0][i] += counts[1][i] + counts[2][i] + counts[3][i];
    std::array<uint8_t, 256> order;
    std::iota(order.begin(), order.end(), uint8_t{0});
    std::ranges::partial_sort(order, order.begin() + kCodes, [&](uint8_t a, uint8_t b) {
      return counts[0][a] > counts[0][b] || (counts[0][a] == counts[0][b] && a < b);
    });
    codes.fill(kCodes);
    for (size_t i = 0; i < kCodes; ++i) {
      values[i] = order[i];
      codes[order[i]] = static_cast<uint8_t>(i);
    }
  }
};

}  // namespace

bool code_panel(const uint16_t* panel, int64_t columns, std::byte* to) {
  const int64_t count = kPanelRows * round_up(columns, 2);
  const Table table(panel, count);
  std::memset(to, 0, kCodedTableBytes);
  std::memcpy(to, table.values.data(), kCodes);
  auto* unit = reinterpret_cast<uint8_t*>(to) + kCodedTableBytes;
  std::byte* patches = to + coded_patches_at(columns);
  int64_t patches_left = coded_patches_max(columns);
  const auto put_patch = [&](uint32_t patch) {
    std::memcpy(patches, &patch, sizeof patch);
    patches += sizeof patch;
  };
  for (int64_t first = 0; first < count; first += kPair, unit += kCodedPairBytes) {
    std::array<uint8_t, kPair> codes;
    for (int64_t e = 0; e < kPair; ++e) {
      const uint16_t bits = panel[first + e];
      const uint8_t place = kPlaces[static_cast<size_t>(e)];
      uint8_t code = table.codes[bits >> 8];
      if (code == kCodes) {
        if (patches_left-- == 0) return false;
        put_patch(static_cast<uint32_t>(first + e) << 8 | bits >> 8);
        code = 0;
      }
      unit[place] = static_cast<uint8_t>(bits);
      codes[place] = code;
    }
    for (size_t i = 0; i < kPair / 2; ++i)
      unit[kPair + static_cast<int64_t>(i)] = static_cast<uint8_t>(codes[i] | codes[i + kPair / 2] << 4);
  }
  put_patch(kLastPatch);
  return true;
}

void decode_row(const std::byte* panel, int64_t columns, int64_t row, float* to) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(panel);
  const auto unit_of = [&](int64_t column) {
    return bytes + kCodedTableBytes + column / 2 * kCodedPairBytes;
  };
  const auto place_of = [&](int64_t column) { return kPlaces[static_cast<size_t>(2 * row + column % 2)]; };
  const auto put = [&](int64_t column, uint32_t high) {
    const uint32_t bits = high << 24 | static_cast<uint32_t>(unit_of(column)[place_of(column)]) << 16;
    std::memcpy(to + column, &bits, sizeof bits);
  };
  for (int64_t c = 0; c < columns; ++c) {
    const uint8_t place = place_of(c);
    const uint8_t codes = unit_of(c)[kPair + place % 64];
    put(c, bytes[place < 64 ? codes & 15 : codes >> 4]);
  }
  for (const std::byte* at = panel + coded_patches_at(columns);; at += sizeof(uint32_t)) {
    uint32_t patch;
    std::memcpy(&patch, at, sizeof patch);
    if (patch == kLastPatch) return;
    const int64_t element = patch >> 8, column = element / kPair * 2 + element % 2;
    if (element % kPair / 2 == row && column < columns) put(column, patch & 0xFF);
  }
}

}  // namespace overspill::inference
