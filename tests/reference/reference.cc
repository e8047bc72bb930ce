#include "tests/reference/reference.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/reference/bits.h"

namespace {

using overspill::reference::as_bits;
using overspill::reference::as_float;

struct Hyper {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;
  double step, grad_scale;
};

// In 64-bit integers, where nothing wraps: hi is the multiple of 2^16 nearest to bits, upwards at the middle.
void split_one(uint32_t bits, uint16_t& hi, int16_t& lo) {
  const int64_t multiple = (static_cast<int64_t>(bits) + 32768) / 65536;
  hi = static_cast<uint16_t>(multiple % 65536);
  lo = static_cast<int16_t>(static_cast<int64_t>(bits) - multiple * 65536);
}

uint32_t join_one(uint16_t hi, int16_t lo) {
  const int64_t sum = static_cast<int64_t>(hi) * 65536 + lo;
  return static_cast<uint32_t>(sum < 0 ? sum + (int64_t{1} << 32) : sum);
}

float element(const void* x, bool is_bf16, int64_t i) {
  return is_bf16 ? reference_widen(static_cast<const uint16_t*>(x)[i]) : static_cast<const float*>(x)[i];
}

float adam_one(float p, float& m, float& v, float grad, const Hyper& h) {
  float g = grad * static_cast<float>(h.grad_scale);
  if (!h.decoupled && static_cast<float>(h.weight_decay) != 0) {
    g = std::fma(static_cast<float>(h.weight_decay), p, g);
  }
  if (h.decoupled) p *= static_cast<float>(1.0 - h.lr * h.weight_decay);
  m = std::fma(static_cast<float>(1.0 - h.beta1), g - m, m);
  const float squared = g * g;
  v = std::fma(static_cast<float>(1.0 - h.beta2), squared, static_cast<float>(h.beta2) * v);
  const auto step_size = static_cast<float>(h.lr / (1.0 - std::pow(h.beta1, h.step)));
  const auto inverse = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(h.beta2, h.step)));
  const float denominator = std::fma(std::sqrt(v), inverse, static_cast<float>(h.eps));
  return std::fma(-step_size, m / denominator, p);
}

}  // namespace

void reference_split(const uint32_t* bits, uint16_t* hi, int16_t* lo, int64_t n) {
  for (int64_t i = 0; i < n; ++i) split_one(bits[i], hi[i], lo[i]);
}

void reference_join(const uint16_t* hi, const int16_t* lo, uint32_t* bits, int64_t n) {
  for (int64_t i = 0; i < n; ++i) bits[i] = join_one(hi[i], lo[i]);
}

void reference_adam_split(uint16_t* hi, int16_t* lo, float* m, float* v, const void* grad, int grad_is_bf16,
                          int64_t n, double lr, double beta1, double beta2, double eps, double weight_decay,
                          int decoupled, int64_t step, double grad_scale) {
  const Hyper h{lr, beta1, beta2, eps, weight_decay, decoupled != 0, static_cast<double>(step), grad_scale};
  for (int64_t i = 0; i < n; ++i) {
    const float p =
        adam_one(as_float(join_one(hi[i], lo[i])), m[i], v[i], element(grad, grad_is_bf16 != 0, i), h);
    split_one(as_bits(p), hi[i], lo[i]);
  }
}

void reference_adam_fp32(float* p, float* m, float* v, const float* grad, int64_t n, double lr, double beta1,
                         double beta2, double eps, double weight_decay, int decoupled, int64_t step,
                         double grad_scale) {
  const Hyper h{lr, beta1, beta2, eps, weight_decay, decoupled != 0, static_cast<double>(step), grad_scale};
  for (int64_t i = 0; i < n; ++i) p[i] = adam_one(p[i], m[i], v[i], grad[i], h);
}

double reference_squares(const void* x, int is_bf16, int64_t n, int* finite) {
  long double sum = 0;
  *finite = 1;
  for (int64_t i = 0; i < n; ++i) {
    const float value = element(x, is_bf16 != 0, i);
    if (std::isfinite(value)) {
      sum += static_cast<long double>(value) * value;
    } else {
      *finite = 0;
    }
  }
  return static_cast<double>(sum);
}

double reference_tree_squares(const void* x, int is_bf16, int64_t n, int* finite) {
  double total = 0;
  *finite = 1;
  for (int64_t block = 0; block * 4096 < n; ++block) {
    std::vector<double> lanes(32, 0.0);
    for (int64_t i = 0; i < 4096 && block * 4096 + i < n; ++i) {
      const double value = element(x, is_bf16 != 0, block * 4096 + i);
      if (!std::isfinite(value)) *finite = 0;
      if (std::isfinite(value)) lanes[static_cast<size_t>(i % 32)] += value * value;
    }
    while (lanes.size() > 1) {
      const size_t half = lanes.size() / 2;
      for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
      lanes.resize(half);
    }
    total += lanes[0];
  }
  return total;
}

float reference_widen(uint16_t bf16) {
  return as_float(static_cast<uint32_t>(bf16) * 65536u);
}

uint16_t reference_narrow(float x) {
  if (std::isnan(x)) return 0x7FC0;
  const uint32_t below = as_bits(x) / 65536u;
  const uint32_t rest = as_bits(x) % 65536u;
  const bool up = rest > 32768u || (rest == 32768u && below % 2 == 1);
  return static_cast<uint16_t>(below + (up ? 1 : 0));
}
