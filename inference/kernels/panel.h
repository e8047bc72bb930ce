// How weights lie in memory for the kernels. A panel has 64 rows of a matrix, column after column, so that a
// vector register holds the same column of neighbouring rows: each lane adds up one output, nothing is summed
// across lanes, and a product reads one sequential stream. The same bytes serve one vector and many.
//
// bf16: two columns of a row lie side by side (four bytes), as the instruction VDPBF16PS wants them:
//   [column / 2][row][column % 2]. An odd last column is followed by zeros.
// fp32: [column][row].
// coded: bf16 in twelve bits, see kernels/coded.h.
// int8: bytes and scales, see kernels/int8.h.
// Rows that the matrix does not have are zeros.
#pragma once

#include <cstdint>

namespace overspill::inference {

inline constexpr int64_t kPanelRows = 64;

enum class Element : uint8_t { bf16, fp32, coded, int8 };

/// Bytes of an element that lies by itself, which a coded one does not.
constexpr int64_t bytes_of(Element element) {
  return element == Element::fp32 ? 4 : element == Element::int8 ? 1 : 2;
}

constexpr int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

constexpr int64_t panels_of(int64_t rows) {
  return (rows + kPanelRows - 1) / kPanelRows;
}

}  // namespace overspill::inference
