// bf16 in twelve bits, without loss. The low byte of a bf16 number (a bit of the exponent, and the mantissa)
// is noise and stays as it is. The high byte (the sign, and seven bits of the exponent) has few values:
// weights are near a Gaussian, and the 16 commonest values of a panel, each two powers of two of one sign,
// are all but about one in 10,000 of its high bytes. So a high byte becomes a code of four bits, its place in
// a table of the panel, which one VPSHUFB looks up for 64 weights; the others are repaired from a list of
// patches.
//
// A panel: a table of 16 bytes, padded to 64; for each pair of columns 128 low bytes and 64 bytes with two
// codes each; the patches. Element i of a pair is row i / 2, column i % 2, as in a panel of bf16. The order
// of the bytes is such that interleaving the halves of 16 low bytes with those of their high bytes gives
// neighbours: low byte 64 a + 16 b + 8 c + d belongs to element 64 a + 32 c + 8 b + d, for a and c below 2, b
// below 4 and d below 8; its code is in byte 16 b + 8 c + d of the codes, in the lower four bits for a = 0.
//
// A patch is a number of 32 bits: the element's index in the panel times 256, plus its high byte. Patches lie
// by index, and one of all ones ends them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "inference/kernels/panel.h"

namespace overspill::inference {

inline constexpr int64_t kCodes = 16;
inline constexpr int64_t kCodedTableBytes = 64;
inline constexpr int64_t kCodedPairBytes = 192;
inline constexpr uint32_t kLastPatch = ~uint32_t{0};

/// Matrices with more columns are not coded: a patch has 24 bits for the index.
inline constexpr int64_t kCodedColumnsMax = (int64_t{1} << 24) / kPanelRows - 2;

/// A panel has room for so many, in each 256 elements one: some ten times what Gaussian weights need, and 1 %
/// of the bytes, which are not read where there are no patches.
constexpr int64_t coded_patches_max(int64_t columns) {
  return kPanelRows * round_up(columns, 2) / 256;
}

/// Where the patches lie in a panel.
constexpr int64_t coded_patches_at(int64_t columns) {
  return kCodedTableBytes + round_up(columns, 2) / 2 * kCodedPairBytes;
}

constexpr int64_t coded_panel_bytes(int64_t columns) {
  return round_up(coded_patches_at(columns) + 4 * (coded_patches_max(columns) + 1), 64);
}

/// Codes a panel of bf16. False, with `to` in no defined state, where it needs more patches than there is
/// room for; then it stays as it is.
bool code_panel(const uint16_t* panel, int64_t columns, std::byte* to);

/// Row `row` of a coded panel, as fp32: `columns` elements, whose upper halves are bit for bit what was
/// coded.
void decode_row(const std::byte* panel, int64_t columns, int64_t row, float* to);

}  // namespace overspill::inference
