// Kernels on a CUDA device, bit-equal to cpu_optim/ (a NaN's payload aside). Each is put on the stream and
// returns at once; memory is the device's, aligned to its elements, and stays until an event recorded later
// is done. Counts are elements; arrays do not overlap. Throws DeviceError where the build has no CUDA or the
// kernel cannot be started.
#pragma once

#include <cstdint>

#include "kernels/device.h"

namespace overspill::kernels::cuda {

/// As optim::Adam::Factors, and the gradient's factor.
struct AdamFactors {
  float l2 = 0;
  float decay = 1;
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float minus_step_size = 0;
  float inverse_sqrt_bias2 = 1;
  float eps = 0;
  float grad_scale = 1;
};

/// The split master and its moments.
struct AdamArrays {
  uint16_t* hi;
  int16_t* lo;
  float* m;
  float* v;
};

/// A block of the tree (optim::Squares), or all of it.
struct Squares {
  double sum = 0;
  int64_t not_finite = 0;  // 0: every element is finite
};
constexpr int64_t kSquaresBlock = 4096;
constexpr int64_t squares_blocks(int64_t count) {
  return (count + kSquaresBlock - 1) / kSquaresBlock;
}

/// To bf16, nearest even, NaN stays NaN.
void narrow(Stream& stream, const float* from, uint16_t* to, int64_t count);
/// to *= factor
void scale(Stream& stream, float* to, float factor, int64_t count);
/// Fills `total`. `blocks` is scratch of squares_blocks(count).
void squares(Stream& stream, const float* from, int64_t count, Squares* blocks, Squares* total);
void squares(Stream& stream, const uint16_t* bf16, int64_t count, Squares* blocks, Squares* total);
/// Gradients are fp32 or bf16.
void update_adam(Stream& stream, const AdamArrays& arrays, const float* gradient, int64_t count,
                 const AdamFactors& factors);
void update_adam(Stream& stream, const AdamArrays& arrays, const uint16_t* gradient, int64_t count,
                 const AdamFactors& factors);

}  // namespace overspill::kernels::cuda
