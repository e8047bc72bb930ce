// Products of int8 panels (kernels/int8.h). An integer of seven bits is exact in bf16, so 32 columns become bf16 in
// a buffer and are multiplied as such; their sums are then scaled and added to what the columns before gave.

/// Two columns as pairs of bf16.
inline void widen_integers(const int8_t* columns, uint16_t* to) {
  for (int64_t r = 0; r < kPanelRows; r += kLanes) {
    const U32 pairs = bits_of(load_values(columns + r)) >> 16 | bits_of(load_values(columns + kPanelRows + r));
    __builtin_memcpy(to + 2 * r, &pairs, sizeof(pairs));
  }
}

/// to[r] += scales[r] * from[r] for the rows of a panel.
inline void add_scaled(const uint16_t* scales, const float* from, float* to) {
  for (int64_t r = 0; r < kPanelRows; r += kLanes)
    store(to + r, fma(load(from + r, All{}), widen_lanes(load(scales + r, All{})), load(to + r, All{})), All{});
}

/// A group of columns as bf16.
__attribute__((always_inline)) inline void widen_group(const int8_t* integers, int64_t columns, uint16_t* to) {
  for (int64_t c = 0; c < columns; c += 2) {
    for (int64_t line = 0; line < 2 * kPanelRows; line += 64)
      __builtin_prefetch(integers + c * kPanelRows + kPrefetchBytes + line);
    widen_integers(integers + c * kPanelRows, to + c * kPanelRows);
  }
}

void multiply_int8(const std::byte* panel, const uint16_t* x, int64_t x_stride, int64_t columns, float* out,
                   int64_t out_stride, int64_t vectors) {
  alignas(64) uint16_t weights[kPanelRows * kScaledColumns];
  alignas(64) float sums[kTileVectors * kPanelRows];
  set_to_zero(out, out_stride, vectors);
  for (int64_t c = 0; c < columns; c += kScaledColumns) {
    const int64_t n = columns - c < kScaledColumns ? columns - c : kScaledColumns;
    const auto* const scales = reinterpret_cast<const uint16_t*>(panel + int8_group_at(c));
    const auto* const integers = reinterpret_cast<const int8_t*>(scales + kPanelRows);
    if (vectors == 1 && n == kScaledColumns) {  // with a constant for the count, half the time
      widen_group(integers, kScaledColumns, weights);
      multiply_rows<1, kPanelRows / kLanes, Pairs, FromZero>(weights, x + c, x_stride, kScaledColumns, sums,
                                                            kPanelRows);
      add_scaled(scales, sums, out);
      continue;
    }
    widen_group(integers, n, weights);
    for (int64_t first = 0; first < vectors; first += kTileVectors) {
      const int64_t together = vectors - first < kTileVectors ? vectors - first : kTileVectors;
      multiply<Pairs>(weights, x + first * x_stride + c, x_stride, n, sums, kPanelRows, together);
      for (int64_t v = 0; v < together; ++v)
        add_scaled(scales, sums + v * kPanelRows, out + (first + v) * out_stride);
    }
  }
}
