// How weights lie in memory for the kernels. A panel has 64 rows of a matrix, column after column, so that a
// vector register holds the same column of neighbouring rows: each lane adds up one output, nothing is summed
// across lanes, and a product reads one sequential stream. The same bytes serve one vector and many.
//
// bf16: two columns of a row lie side by side (four bytes), as the instruction VDPBF16PS wants them:
//   [column / 2][row][column % 2]. An odd last column is followed by zeros.
// fp32: [column][row].
// Rows that the matrix does not have are zeros.
#pragma once

#include <cstdint>

namespace overspill::inference {

inline constexpr int64_t kPanelRows = 64;

enum class Element : uint8_t { bf16, fp32 };

constexpr int64_t bytes_of(Element element) {
  return element == Element::bf16 ? 2 : 4;
}

constexpr int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

constexpr int64_t panels_of(int64_t rows) {
  return (rows + kPanelRows - 1) / kPanelRows;
}

/// Bytes of one panel of a matrix with so many columns.
constexpr int64_t panel_bytes(Element element, int64_t columns) {
  return kPanelRows * bytes_of(element) * (element == Element::bf16 ? round_up(columns, 2) : columns);
}

}  // namespace overspill::inference
