// Adam and AdamW over spans: one fused pass that unscales, clips, decays, updates moments and weight, and
// splits the weight.
//
// Adam: Kingma and Ba 2014 (arXiv 1412.6980), algorithm 1. AdamW: Loshchilov and Hutter 2017 (arXiv
// 1711.05101), algorithm 2. Each byte is read once and written once. Results are bit-equal on every
// instruction set: explicit fused multiply-adds, correctly rounded division and square root, the same order
// everywhere, denormals kept. Pointers need the alignment of their element only. Arrays must not overlap.
// Threads: no shared state; callers split the work.
#pragma once

#include <cstdint>
#include <span>

namespace overspill::optim {

/// Hyper-parameters of one parameter group, as torch.optim names them.
struct AdamConfig {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = true;  // true: AdamW; false: Adam, weight_decay is an L2 term added to the gradient
};

/// The factors of one update, derived in double precision and rounded once.
struct AdamFactors {
  float grad_scale;  // clip factor / loss scale; multiplies the gradient first
  float l2;          // weight_decay of Adam, else 0
  float decay;       // 1 - lr * weight_decay of AdamW, else 1
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;           // lr / (1 - beta1^step)
  float inverse_sqrt_bias2;  // 1 / sqrt(1 - beta2^step)
  float eps;

  friend bool operator==(const AdamFactors&, const AdamFactors&) = default;
};

/// `step` counts from 1.
AdamFactors adam_factors(const AdamConfig& config, int64_t step, double grad_scale);

// The arithmetic, element by element, all in fp32 (fma(a, b, c) = a * b + c rounded once):
//   g = grad * grad_scale;  if l2 != 0: g = fma(l2, p, g)
//   p = p * decay
//   m = fma(one_minus_beta1, g - m, m)
//   v = fma(one_minus_beta2, g * g, beta2 * v)
//   p = fma(-step_size, m / fma(sqrt(v), inverse_sqrt_bias2, eps), p)

/// bf16 weights with split master. `hi`, `lo`, `m`, `v` and `grad` hold the same number of elements; a
/// mismatch throws std::invalid_argument before anything is written. The gradient is bf16 bits or fp32.
void adam_split(std::span<uint16_t> hi, std::span<int16_t> lo, std::span<float> m, std::span<float> v,
                std::span<const uint16_t> grad, const AdamFactors& factors);
void adam_split(std::span<uint16_t> hi, std::span<int16_t> lo, std::span<float> m, std::span<float> v,
                std::span<const float> grad, const AdamFactors& factors);

/// fp32 weights.
void adam_fp32(std::span<float> p, std::span<float> m, std::span<float> v, std::span<const float> grad,
               const AdamFactors& factors);

}  // namespace overspill::optim
