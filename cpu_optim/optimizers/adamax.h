// Adamax: Kingma and Ba 2014 (arXiv 1412.6980), algorithm 2, as torch.optim.Adamax computes it: eps is added
// to the gradient's size, so that the norm is never zero.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu_optim/optimizers/state.h"

namespace overspill::optim {

/// As torch.optim.Adamax names them.
struct AdamaxConfig {
  double lr = 2e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  // an L2 term added to the gradient
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("beta1", beta1);
    visit("beta2", beta2);
    visit("eps", eps);
    visit("weight_decay", weight_decay);
    visit("maximize", maximize);
  }
};

struct Adamax {
  using Config = AdamaxConfig;
  static constexpr const char* kName = "adamax";
  static constexpr int kStateCount = 2;
  static constexpr StateSpec kStates[] = {{"m", Values::any}, {"exp_inf", Values::sum_of_squares}};

  struct Factors {
    float l2;
    float one_minus_beta1;
    float beta2;
    float eps;
    float minus_step_size;  // -lr / (1 - beta1^step)
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  static Factors factors(const Config& c, int64_t step) {
    const double bias = 1.0 - std::pow(c.beta1, static_cast<double>(step));
    return {.l2 = static_cast<float>(c.weight_decay),
            .one_minus_beta1 = static_cast<float>(1.0 - c.beta1),
            .beta2 = static_cast<float>(c.beta2),
            .eps = static_cast<float>(c.eps),
            .minus_step_size = -static_cast<float>(c.lr / bias)};
  }
  static float initial(const Config&, int) { return 0; }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V* state) {
    V &m = state[0], &norm = state[1];
    if (nonzero(f.l2)) g = fma(V(f.l2), p, g);
    m = fma(V(f.one_minus_beta1), g - m, m);
    norm = larger(norm * f.beta2, abs(g) + f.eps);
    p = fma(V(f.minus_step_size), m / norm, p);
  }
};

}  // namespace overspill::optim
