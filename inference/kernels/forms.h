// The forms of the kernels, one per instruction set. The arithmetic is written once (forms.inl) and compiled
// for each; the choice is made above the loops. Within a form a result does not depend on how many vectors,
// rows or positions are computed together: each output is added up in one order.
//
// Forms differ from each other by rounding: portable multiplies and adds where the others fuse, and
// avx512bf16 takes products of bf16 by VDPBF16PS, which reads denormals as zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "inference/kernels/panel.h"

namespace overspill::inference {

/// A run of positions in the cache of one key and value head, and the rows that look at them.
struct AttentionRows {
  int64_t rows = 0;
  int64_t begin = 0, end = 0;  // positions; `begin` is a multiple of kKeyBlock
  int64_t head_size = 0;
  int64_t value_stride = 0;  // elements from one position's value to the next: a multiple of kKeyBlock
};

/// Keys lie in blocks of so many positions, [block][dimension][position], so that a register holds one
/// dimension of neighbouring positions.
inline constexpr int64_t kKeyBlock = 16;

/// Lengths count elements. Pointers need their element's alignment. What a kernel writes does not overlap
/// what it reads, but where it says so.
struct Kernels {
  const char* name;

  /// out[v][r] = sum over c of panel[c][r] * x[v][c], for `vectors` vectors and the panel's 64 rows. Strides
  /// count elements. bf16: `columns` is even, and x is bf16 too.
  void (*multiply_bf16)(const uint16_t* panel, const uint16_t* x, int64_t x_stride, int64_t columns,
                        float* out, int64_t out_stride, int64_t vectors);
  void (*multiply_fp32)(const float* panel, const float* x, int64_t x_stride, int64_t columns, float* out,
                        int64_t out_stride, int64_t vectors);

  /// The same, bit for bit as multiply_bf16 of the panel that was coded (kernels/coded.h).
  void (*multiply_coded)(const std::byte* panel, const uint16_t* x, int64_t x_stride, int64_t columns,
                         float* out, int64_t out_stride, int64_t vectors);
  /// The same with the weights that quantise_panel rounds to (kernels/int8.h).
  void (*multiply_int8)(const std::byte* panel, const uint16_t* x, int64_t x_stride, int64_t columns,
                        float* out, int64_t out_stride, int64_t vectors);

  /// scores[r][p] = q[r] . key[p] for p in [begin, end rounded up to a block); q is [rows][head_size].
  void (*score_bf16)(const AttentionRows& at, const float* q, const uint16_t* keys, float* scores,
                     int64_t score_stride);
  void (*score_fp32)(const AttentionRows& at, const float* q, const float* keys, float* scores,
                     int64_t score_stride);
  /// The same with keys that are integers times scales[p]; of scales, too, the last block is read whole.
  void (*score_int8)(const AttentionRows& at, const float* q, const int8_t* keys, const float* scales,
                     float* scores, int64_t score_stride);
  /// out[r][d] += weights[r][p] * value[p][d] for p in [begin, end), one after the other, so that a sum over
  /// several runs of positions is that over one; `out_stride` is at least value_stride, whose elements are
  /// written.
  void (*mix_bf16)(const AttentionRows& at, const float* weights, int64_t weight_stride,
                   const uint16_t* values, float* out, int64_t out_stride);
  void (*mix_fp32)(const AttentionRows& at, const float* weights, int64_t weight_stride, const float* values,
                   float* out, int64_t out_stride);
  /// The same with values that are integers times scales[p].
  void (*mix_int8)(const AttentionRows& at, const float* weights, int64_t weight_stride, const int8_t* values,
                   const float* scales, float* out, int64_t out_stride);
  /// x[i] = exp(x[i] * scale - m) / sum of these, m the largest x * scale, for i in [first, last); with
  /// softcap > 0, x * scale becomes softcap * tanh(x * scale / softcap) first. The rest of [begin, end)
  /// becomes 0. `begin` and `end` are multiples of kKeyBlock, and first < last.
  void (*softmax)(float* x, int64_t begin, int64_t first, int64_t last, int64_t end, float scale,
                  float softcap);

  float (*sum_of_squares)(const float* x, int64_t n);
  float (*sum)(const float* x, int64_t n);
  float (*log_sum_exp)(const float* x, int64_t n);  // n > 0
  /// to = (x - mean) * factor * (weight + offset) + bias; `to` may be x.
  void (*normalise)(const float* x, float mean, float factor, const float* weight, float offset,
                    const float* bias, float* to, int64_t n);
  /// x = x * sigmoid(x * slope(x)): silu, or gelu by tanh; `up`, if not null, is multiplied in.
  void (*silu)(float* x, const float* up, int64_t n);
  void (*gelu_tanh)(float* x, const float* up, int64_t n);
  void (*add)(const float* x, float* to, int64_t n);
  void (*narrow)(const float* x, uint16_t* to, int64_t n);  // to nearest even; a NaN becomes 0x7FC0
  void (*widen)(const uint16_t* x, float* to, int64_t n);
  /// x as integers from -127 to 127 times a scale, which is returned: a 127th of the largest magnitude. 0
  /// where that is no normal number, and infinite or a NaN where x has one; then what is computed with it is
  /// a NaN.
  float (*quantise)(const float* x, int8_t* to, int64_t n);
};

/// What this machine can run, narrowest first: "portable", then "neon", or "avx2", "avx512", "avx512bf16".
std::span<const Kernels* const> available_kernels();

/// The widest of them that the environment variable OVERSPILL_ISA allows (cpu_optim/dispatch.h; "avx512"
/// includes avx512bf16).
const Kernels& kernels();

}  // namespace overspill::inference
