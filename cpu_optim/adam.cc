#include "cpu_optim/adam.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "cpu_optim/dispatch.h"
#include "cpu_optim/floating_point.h"
#include "cpu_optim/sizes.h"

namespace overspill::optim {

AdamFactors adam_factors(const AdamConfig& config, int64_t step, double grad_scale) {
  if (step < 1) {
    throw std::invalid_argument("adam_factors: step is " + std::to_string(step) + "; steps count from 1");
  }
  const FloatingPointMode mode;
  const double bias1 = 1.0 - std::pow(config.beta1, static_cast<double>(step));
  const double bias2 = 1.0 - std::pow(config.beta2, static_cast<double>(step));
  return AdamFactors{
      .grad_scale = static_cast<float>(grad_scale),
      .l2 = config.decoupled ? 0.0f : static_cast<float>(config.weight_decay),
      .decay = config.decoupled ? static_cast<float>(1.0 - config.lr * config.weight_decay) : 1.0f,
      .one_minus_beta1 = static_cast<float>(1.0 - config.beta1),
      .beta2 = static_cast<float>(config.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - config.beta2),
      .step_size = static_cast<float>(config.lr / bias1),
      .inverse_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2)),
      .eps = static_cast<float>(config.eps),
  };
}

namespace {

template <class Grad, class Kernel>
void checked_split(std::span<uint16_t> hi, std::span<int16_t> lo, std::span<float> m, std::span<float> v,
                   std::span<const Grad> grad, const AdamFactors& factors, Kernel kernel) {
  check_size("adam_split", "lo", lo.size(), hi.size());
  check_size("adam_split", "m", m.size(), hi.size());
  check_size("adam_split", "v", v.size(), hi.size());
  check_size("adam_split", "grad", grad.size(), hi.size());
  const FloatingPointMode mode;
  kernel(hi.data(), lo.data(), m.data(), v.data(), grad.data(), std::ssize(hi), factors);
}

}  // namespace

void adam_split(std::span<uint16_t> hi, std::span<int16_t> lo, std::span<float> m, std::span<float> v,
                std::span<const uint16_t> grad, const AdamFactors& factors) {
  checked_split(hi, lo, m, v, grad, factors, kernels().adam_split_bf16);
}

void adam_split(std::span<uint16_t> hi, std::span<int16_t> lo, std::span<float> m, std::span<float> v,
                std::span<const float> grad, const AdamFactors& factors) {
  checked_split(hi, lo, m, v, grad, factors, kernels().adam_split_fp32);
}

void adam_fp32(std::span<float> p, std::span<float> m, std::span<float> v, std::span<const float> grad,
               const AdamFactors& factors) {
  check_size("adam_fp32", "m", m.size(), p.size());
  check_size("adam_fp32", "v", v.size(), p.size());
  check_size("adam_fp32", "grad", grad.size(), p.size());
  const Kernels& form = kernels();
  const FloatingPointMode mode;
  form.adam_fp32(p.data(), m.data(), v.data(), grad.data(), std::ssize(p), factors);
}

}  // namespace overspill::optim
