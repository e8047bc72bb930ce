// NAdam: Dozat 2016 (Incorporating Nesterov Momentum into Adam, ICLR workshop), as torch.optim.NAdam computes
// it, with the momentum's schedule of section 3.2.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu_optim/optimizers/state.h"

namespace overspill::optim {

/// As torch.optim.NAdam names them.
struct NadamConfig {
  double lr = 2e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  double momentum_decay = 4e-3;
  bool decoupled_weight_decay =
      false;  // true: weight_decay as in AdamW; false: an L2 term added to the gradient
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("beta1", beta1);
    visit("beta2", beta2);
    visit("eps", eps);
    visit("weight_decay", weight_decay);
    visit("momentum_decay", momentum_decay);
    visit("decoupled_weight_decay", decoupled_weight_decay);
    visit("maximize", maximize);
  }
};

struct Nadam {
  using Config = NadamConfig;
  static constexpr const char* kName = "nadam";
  static constexpr int kStateCount = 2;
  static constexpr StateSpec kStates[] = {{"m", Values::any}, {"v", Values::sum_of_squares}};

  struct Factors {
    float l2;
    float decay;  // 1 - lr * weight_decay where it is decoupled, else 1
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float inverse_sqrt_bias2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float minus_step_of_gradient;  // -lr (1 - mu_step) / (1 - mu_1 ... mu_step)
    float minus_step_of_average;   // -lr mu_(step + 1) / (1 - mu_1 ... mu_(step + 1))
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  /// The momentum of a step: beta1 (1 - 0.96^(step * momentum_decay) / 2).
  static double momentum(const Config& c, int64_t step) {
    return c.beta1 * (1.0 - 0.5 * std::pow(0.96, static_cast<double>(step) * c.momentum_decay));
  }

  /// mu_1 ... mu_step, to double precision of 1 minus it: each is below beta1, so that the product soon no
  /// longer counts beside 1.
  static double product_of_momenta(const Config& c, int64_t step) {
    double product = 1;
    for (int64_t i = 1; i <= step && product > 0x1p-60; ++i) product *= momentum(c, i);
    return product;
  }

  static Factors factors(const Config& c, int64_t step) {
    const double bias2 = 1.0 - std::pow(c.beta2, static_cast<double>(step));
    const double next = momentum(c, step + 1), product = product_of_momenta(c, step);
    return {.l2 = c.decoupled_weight_decay ? 0.0f : static_cast<float>(c.weight_decay),
            .decay = c.decoupled_weight_decay ? static_cast<float>(1.0 - c.lr * c.weight_decay) : 1.0f,
            .one_minus_beta1 = static_cast<float>(1.0 - c.beta1),
            .beta2 = static_cast<float>(c.beta2),
            .one_minus_beta2 = static_cast<float>(1.0 - c.beta2),
            .inverse_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2)),
            .eps = static_cast<float>(c.eps),
            .minus_step_of_gradient = -static_cast<float>(c.lr * (1.0 - momentum(c, step)) / (1.0 - product)),
            .minus_step_of_average = -static_cast<float>(c.lr * next / (1.0 - product * next))};
  }
  static float initial(const Config&, int) { return 0; }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V* state) {
    V &m = state[0], &v = state[1];
    if (nonzero(f.l2)) g = fma(V(f.l2), p, g);
    p = p * f.decay;
    m = fma(V(f.one_minus_beta1), g - m, m);
    v = fma(V(f.one_minus_beta2), g * g, v * f.beta2);
    const V root = fma(sqrt(v), V(f.inverse_sqrt_bias2), V(f.eps));
    p = fma(V(f.minus_step_of_gradient), g / root, p);
    p = fma(V(f.minus_step_of_average), m / root, p);
  }
};

}  // namespace overspill::optim
