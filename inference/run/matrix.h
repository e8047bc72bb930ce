// A matrix in panels (kernels/panel.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "inference/kernels/coded.h"
#include "inference/kernels/int8.h"
#include "inference/kernels/panel.h"

namespace overspill::inference {

/// Bytes of one panel of a matrix with so many columns.
constexpr int64_t panel_bytes(Element element, int64_t columns) {
  switch (element) {
    case Element::bf16:
      return 2 * kPanelRows * round_up(columns, 2);
    case Element::fp32:
      return 4 * kPanelRows * columns;
    case Element::coded:
      return coded_panel_bytes(columns);
    case Element::int8:
      return int8_panel_bytes(columns);
  }
  return 0;
}

/// A view; `panels_of(rows)` panels lie one behind the other.
struct Matrix {
  Element element = Element::bf16;
  int64_t rows = 0;
  int64_t columns = 0;
  std::byte* data = nullptr;

  int64_t panels() const { return panels_of(rows); }
  int64_t bytes() const { return panels() * panel_bytes(element, columns); }
  const std::byte* panel(int64_t i) const { return data + i * panel_bytes(element, columns); }
  /// Row `row`, as fp32. `to` has `columns` elements.
  void copy_row(int64_t row, float* to) const;
};

/// Matrices begin at a page, so that each has the alignment of a cache line and threads share few pages.
inline int64_t aligned_bytes(const Matrix& matrix) {
  return round_up(matrix.bytes(), 4096);
}

/// The panels that are one thread's: [first, last).
struct PanelRange {
  int64_t first, last;
};
inline PanelRange own_panels(int64_t panels, int thread, int threads) {
  return {panels * thread / threads, panels * (thread + 1) / threads};
}

}  // namespace overspill::inference
