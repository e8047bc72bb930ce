// What a device computes by itself for units that live on it (DESIGN 5): their gradients are added up, their
// squares are summed and their states are updated there. Bit-equal to cpu_optim/, a NaN's payload aside: what
// is done to one element is written once, in kernels/math.h.
//
// Each call is put on a stream of the device and returns at once. Memory is the device's, aligned to its
// elements; it stays, and what is read stays unchanged, until an event recorded later is done. Counts are
// elements; arrays do not overlap. Threads: as the stream. Errors: DeviceError for another device's stream
// and for what cannot be started.
#pragma once

#include <cstdint>

#include "kernels/device.h"

namespace overspill::kernels {

enum class Float : uint8_t { bf16, fp32 };

/// Factors of Adam and AdamW, as optim::Adam::Factors, and the gradient's factor.
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

/// A weight and its moments. With `lo` the weight is the bf16 half of a split master (DESIGN 3) and `lo` the
/// other one, int16; without it is fp32.
struct AdamArrays {
  void* weight = nullptr;
  int16_t* lo = nullptr;
  float* m = nullptr;
  float* v = nullptr;
};

/// A block of the tree of squares (optim::Squares); whoever wants the total adds them in order.
struct Squares {
  double sum = 0;
  int64_t not_finite = 0;  // 0: every element is finite
};
constexpr int64_t kSquaresBlock = 4096;
constexpr int64_t squares_blocks(int64_t count) {
  return (count + kSquaresBlock - 1) / kSquaresBlock;
}

class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;
  /// To zero.
  virtual void clear(Stream& stream, void* to, int64_t bytes) = 0;
  /// A gradient comes in: to = from where it is the first of a step, else to += from. Of the same type, or
  /// from bf16 to fp32; bf16 sums are rounded to nearest even.
  virtual void take_in(Stream& stream, Float from_type, const void* from, Float to_type, void* to,
                       int64_t count, bool first) = 0;
  /// Fills squares_blocks(count) blocks.
  virtual void squares(Stream& stream, Float type, const void* from, int64_t count, Squares* blocks) = 0;
  virtual void update_adam(Stream& stream, const AdamArrays& arrays, Float gradient_type,
                           const void* gradient, int64_t count, const AdamFactors& factors) = 0;
};

}  // namespace overspill::kernels
