// Adam: Kingma and Ba 2014 (arXiv 1412.6980), algorithm 1. AdamW: Loshchilov and Hutter 2017 (arXiv
// 1711.05101), algorithm 2.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu_optim/optimizers/state.h"

namespace overspill::optim {

/// As torch.optim.AdamW and Adam name them.
struct AdamConfig {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = true;  // true: AdamW; false: Adam, weight_decay is an L2 term added to the gradient
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("beta1", beta1);
    visit("beta2", beta2);
    visit("eps", eps);
    visit("weight_decay", weight_decay);
    visit("decoupled", decoupled);
    visit("maximize", maximize);
  }
};

struct Adam {
  using Config = AdamConfig;
  static constexpr const char* kName = "adam";
  static constexpr int kStateCount = 2;
  static constexpr StateSpec kStates[] = {{"m", Values::any}, {"v", Values::sum_of_squares}};

  struct Factors {
    float l2;     // weight_decay of Adam, else 0
    float decay;  // 1 - lr * weight_decay of AdamW, else 1
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float minus_step_size;     // -lr / (1 - beta1^step)
    float inverse_sqrt_bias2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  static Factors factors(const Config& c, int64_t step) {
    const double bias1 = 1.0 - std::pow(c.beta1, static_cast<double>(step));
    const double bias2 = 1.0 - std::pow(c.beta2, static_cast<double>(step));
    return {.l2 = c.decoupled ? 0.0f : static_cast<float>(c.weight_decay),
            .decay = c.decoupled ? static_cast<float>(1.0 - c.lr * c.weight_decay) : 1.0f,
            .one_minus_beta1 = static_cast<float>(1.0 - c.beta1),
            .beta2 = static_cast<float>(c.beta2),
            .one_minus_beta2 = static_cast<float>(1.0 - c.beta2),
            .minus_step_size = -static_cast<float>(c.lr / bias1),
            .inverse_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2)),
            .eps = static_cast<float>(c.eps)};
  }
  static float initial(const Config&, int) { return 0; }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V* state) {
    V &m = state[0], &v = state[1];
    if (nonzero(f.l2)) g = fma(V(f.l2), p, g);
    p = p * f.decay;
    m = fma(V(f.one_minus_beta1), g - m, m);
    v = fma(V(f.one_minus_beta2), g * g, v * f.beta2);
    p = fma(V(f.minus_step_size), m / fma(sqrt(v), V(f.inverse_sqrt_bias2), V(f.eps)), p);
  }
};

}  // namespace overspill::optim
