// The arithmetic, written once. Included once per instruction set, inside its namespace, after the vector type
// (cpu_optim/vector.inl), kTileVectors, and the form's own fma, extend, lower_halves, load_integers (kLanes of
// int8_t, widened), Pairs (what a register of bf16 pairs is, and its product with a pair), and functions of bytes:
// Bytes is a register of them, repeat_16 fills it with 16, lookup takes those of a table of 16 in each 16 lanes,
// zip_lower and zip_upper interleave the lower and the upper eight of each 16.

#include "inference/kernels/functions.inl"

// Products of a panel. A tile is kVectors vectors by kWidth registers of rows; all sums of a tile stay in
// registers. kWidth is chosen so that they fit.

// Where the sums begin, and how far ahead the panel is fetched.
struct FromZero {
  static constexpr int64_t kPrefetch = kPrefetchBytes;
  static F32 start(const float*) { return F32{}; }
};
/// Goes on with what is in `out`, over a part of a panel that the cache holds.
struct Continued {
  static constexpr int64_t kPrefetch = 0;
  static F32 start(const float* out) { return load(out, All{}); }
};

/// kPrefetch: bytes ahead of what is read.
template <int kVectors, int kWidth, class Weights, int64_t kPrefetch>
inline void accumulate(const typename Weights::Element* panel, const typename Weights::Element* x,
                       int64_t x_stride, int64_t columns, F32 (&sums)[kVectors][kWidth]) {
  constexpr int64_t kStep = Weights::kColumns;
  for (int64_t c = 0; c < columns; c += kStep) {
    const auto* const at = panel + c * kPanelRows;
    if constexpr (kPrefetch > 0) __builtin_prefetch(at + kPrefetch / static_cast<int64_t>(sizeof(*at)));
    Weights weights[kWidth];
    for (int i = 0; i < kWidth; ++i) weights[i] = Weights::load_from(at + i * kLanes * kStep);
    for (int v = 0; v < kVectors; ++v) {
      const auto factor = Weights::broadcast_from(x + v * x_stride + c);
      for (int i = 0; i < kWidth; ++i) sums[v][i] = Weights::multiply_add(weights[i], factor, sums[v][i]);
    }
  }
}

template <int kVectors, int kWidth, class Weights, class Sums>
inline void multiply_tile(const typename Weights::Element* panel, const typename Weights::Element* x,
                          int64_t x_stride, int64_t columns, float* out, int64_t out_stride) {
  F32 sums[kVectors][kWidth];
  for (int v = 0; v < kVectors; ++v) {
    for (int i = 0; i < kWidth; ++i) sums[v][i] = Sums::start(out + v * out_stride + i * kLanes);
  }
  accumulate<kVectors, kWidth, Weights, kVectors == 1 ? Sums::kPrefetch : 0>(panel, x, x_stride, columns, sums);
  for (int v = 0; v < kVectors; ++v) {
    for (int i = 0; i < kWidth; ++i) store(out + v * out_stride + i * kLanes, sums[v][i], All{});
  }
}

template <int kVectors, int kWidth, class Weights, class Sums>
inline void multiply_rows(const typename Weights::Element* panel, const typename Weights::Element* x,
                          int64_t x_stride, int64_t columns, float* out, int64_t out_stride) {
  for (int64_t row = 0; row < kPanelRows; row += kWidth * kLanes) {
    multiply_tile<kVectors, kWidth, Weights, Sums>(panel + row * Weights::kColumns, x, x_stride, columns,
                                                   out + row, out_stride);
  }
}

/// The last vectors, fewer than a tile has.
template <int kVectors, class Weights, class Sums, class... Arguments>
inline void multiply_rest(int64_t vectors, const Arguments&... arguments) {
  if constexpr (kVectors > 0) {
    if (vectors == kVectors) return multiply_rows<kVectors, kTileWidth, Weights, Sums>(arguments...);
    multiply_rest<kVectors - 1, Weights, Sums>(vectors, arguments...);
  }
}

template <class Weights, class Sums = FromZero>
void multiply(const typename Weights::Element* panel, const typename Weights::Element* x, int64_t x_stride,
              int64_t columns, float* out, int64_t out_stride, int64_t vectors) {
  if (vectors == 1) {
    return multiply_rows<1, kPanelRows / kLanes, Weights, Sums>(panel, x, x_stride, columns, out, out_stride);
  }
  for (; vectors >= kTileVectors; vectors -= kTileVectors) {
    multiply_rows<kTileVectors, kTileWidth, Weights, Sums>(panel, x, x_stride, columns, out, out_stride);
    x += kTileVectors * x_stride;
    out += kTileVectors * out_stride;
  }
  multiply_rest<kTileVectors - 1, Weights, Sums>(vectors, panel, x, x_stride, columns, out, out_stride);
}

inline void set_to_zero(float* out, int64_t out_stride, int64_t vectors) {
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t r = 0; r < kPanelRows; r += kLanes) store(out + v * out_stride + r, F32{}, All{});
  }
}

struct Singles {
  using Element = float;
  static constexpr int64_t kColumns = 1;
  F32 values;

  static Singles load_from(const float* from) { return {load(from, All{})}; }
  static F32 broadcast_from(const float* from) { return broadcast(*from); }
  static F32 multiply_add(Singles weights, F32 factor, F32 sum) { return fma(weights.values, factor, sum); }
};

#include "inference/kernels/coded.inl"
#include "inference/kernels/int8.inl"

// Attention over one key and value head. As many rows at once as kAttentionRows share each key and value that is
// read; few rows take several blocks at once, since a sum waits for itself from one addition to the next.

template <int kValue>
struct Count {
  static constexpr int value = kValue;
};

constexpr int kBlockRegisters = static_cast<int>(kKeyBlock) / kLanes;

constexpr int blocks_together(int rows) {
  const int fit = kTileVectors * kTileWidth / (rows * kBlockRegisters);
  return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

// What stored numbers are multiplied by, by position.
struct Unscaled {
  F32 of_scores(F32 scores, int64_t) const { return scores; }
  float of_weight(float weight, int64_t) const { return weight; }
};
struct Scaled {
  const float* scales;
  F32 of_scores(F32 scores, int64_t p) const { return scores * load(scales + p, All{}); }
  float of_weight(float weight, int64_t p) const { return weight * scales[p]; }
};

template <int kRows, int kBlocks, class Stored, class Scale>
inline void score_blocks(const AttentionRows& at, int64_t p, const float* q, const Stored* keys, Scale scale,
                         float* scores, int64_t score_stride) {
  F32 sums[kRows][kBlocks * kBlockRegisters];
  for (auto& row : sums) {
    for (F32& sum : row) sum = F32{};
  }
  for (int64_t d = 0; d < at.head_size; ++d) {
    for (int b = 0; b < kBlocks; ++b) {
      for (int i = 0; i < kBlockRegisters; ++i) {
        const F32 key = load_values(keys + (p + b * kKeyBlock) * at.head_size + d * kKeyBlock + i * kLanes);
        for (int r = 0; r < kRows; ++r) {
          F32& sum = sums[r][b * kBlockRegisters + i];
          sum = fma(key, broadcast(q[r * at.head_size + d]), sum);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kBlocks * kBlockRegisters; ++i)
      store(scores + r * score_stride + p + i * kLanes, scale.of_scores(sums[r][i], p + i * kLanes), All{});
  }
}

template <int kRows, class Stored, class Scale>
inline void score_rows(const AttentionRows& at, const float* q, const Stored* keys, Scale scale, float* scores,
                       int64_t score_stride) {
  constexpr int kBlocks = blocks_together(kRows);
  int64_t p = at.begin;
  for (; p + (kBlocks - 1) * kKeyBlock < at.end; p += kBlocks * kKeyBlock)
    score_blocks<kRows, kBlocks>(at, p, q, keys, scale, scores, score_stride);
  for (; p < at.end; p += kKeyBlock) score_blocks<kRows, 1>(at, p, q, keys, scale, scores, score_stride);
}

template <int kRows, int kBlocks, class Stored, class Scale>
inline void mix_blocks(const AttentionRows& at, int64_t d, const float* weights, int64_t weight_stride,
                       const Stored* values, Scale scale, float* out, int64_t out_stride) {
  F32 sums[kRows][kBlocks * kBlockRegisters];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kBlocks * kBlockRegisters; ++i)
      sums[r][i] = load(out + r * out_stride + d + i * kLanes, All{});
  }
  for (int64_t p = at.begin; p < at.end; ++p) {
    for (int i = 0; i < kBlocks * kBlockRegisters; ++i) {
      const F32 value = load_values(values + p * at.value_stride + d + i * kLanes);
      for (int r = 0; r < kRows; ++r)
        sums[r][i] = fma(value, broadcast(scale.of_weight(weights[r * weight_stride + p], p)), sums[r][i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kBlocks * kBlockRegisters; ++i)
      store(out + r * out_stride + d + i * kLanes, sums[r][i], All{});
  }
}

template <int kRows, class Stored, class Scale>
inline void mix_rows(const AttentionRows& at, const float* weights, int64_t weight_stride, const Stored* values,
                     Scale scale, float* out, int64_t out_stride) {
  constexpr int kBlocks = blocks_together(kRows);
  int64_t d = 0;
  for (; d + kBlocks * kKeyBlock <= at.value_stride; d += kBlocks * kKeyBlock)
    mix_blocks<kRows, kBlocks>(at, d, weights, weight_stride, values, scale, out, out_stride);
  for (; d < at.value_stride; d += kKeyBlock)
    mix_blocks<kRows, 1>(at, d, weights, weight_stride, values, scale, out, out_stride);
}

/// Calls body(row, how many rows) with a constant for the count, kAttentionRows until fewer are left.
template <int kRows = kAttentionRows, class Body>
inline void for_each_group(int64_t rows, Body body, int64_t row = 0) {
  if constexpr (kRows > 0) {
    for (; rows - row >= kRows; row += kRows) body(row, Count<kRows>{});
    for_each_group<kRows - 1>(rows, body, row);
  }
}

template <class Stored, class Scale>
inline void score(const AttentionRows& at, const float* q, const Stored* keys, Scale scale, float* scores,
                  int64_t score_stride) {
  for_each_group(at.rows, [&](int64_t r, auto count) {
    score_rows<count.value>(at, q + r * at.head_size, keys, scale, scores + r * score_stride, score_stride);
  });
}

template <class Stored, class Scale>
inline void mix(const AttentionRows& at, const float* weights, int64_t weight_stride, const Stored* values,
                Scale scale, float* out, int64_t out_stride) {
  for_each_group(at.rows, [&](int64_t r, auto count) {
    mix_rows<count.value>(at, weights + r * weight_stride, weight_stride, values, scale, out + r * out_stride,
                          out_stride);
  });
}

template <class Stored>
void score_unscaled(const AttentionRows& at, const float* q, const Stored* keys, float* scores,
                    int64_t score_stride) {
  score(at, q, keys, Unscaled{}, scores, score_stride);
}
template <class Stored>
void mix_unscaled(const AttentionRows& at, const float* weights, int64_t weight_stride, const Stored* values,
                  float* out, int64_t out_stride) {
  mix(at, weights, weight_stride, values, Unscaled{}, out, out_stride);
}
void score_int8(const AttentionRows& at, const float* q, const int8_t* keys, const float* scales, float* scores,
                int64_t score_stride) {
  score(at, q, keys, Scaled{scales}, scores, score_stride);
}
void mix_int8(const AttentionRows& at, const float* weights, int64_t weight_stride, const int8_t* values,
              const float* scales, float* out, int64_t out_stride) {
  mix(at, weights, weight_stride, values, Scaled{scales}, out, out_stride);
}

constexpr Kernels kTable = {.name = kName,
                            .multiply_bf16 = multiply<Pairs>,
                            .multiply_fp32 = multiply<Singles>,
                            .multiply_coded = multiply_coded,
                            .multiply_int8 = multiply_int8,
                            .score_bf16 = score_unscaled<uint16_t>,
                            .score_fp32 = score_unscaled<float>,
                            .score_int8 = score_int8,
                            .mix_bf16 = mix_unscaled<uint16_t>,
                            .mix_fp32 = mix_unscaled<float>,
                            .mix_int8 = mix_int8,
                            .softmax = softmax,
                            .sum_of_squares = sum_of_squares,
                            .sum = sum,
                            .log_sum_exp = log_sum_exp,
                            .normalise = normalise,
                            .silu = silu,
                            .gelu_tanh = gelu_tanh,
                            .add = add,
                            .narrow = narrow,
                            .widen = widen,
                            .quantise = quantise};
