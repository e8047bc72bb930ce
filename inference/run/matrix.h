// A matrix in panels (kernels/panel.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "inference/kernels/panel.h"

namespace overspill::inference {

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
