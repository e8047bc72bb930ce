// Adadelta: Zeiler 2012 (arXiv 1212.5701), algorithm 1, as torch.optim.Adadelta computes it.
#pragma once

#include <cstdint>

#include "cpu_optim/optimizers/state.h"

namespace overspill::optim {

/// As torch.optim.Adadelta names them.
struct AdadeltaConfig {
  double lr = 1.0;
  double rho = 0.9;  // decay of both averages
  double eps = 1e-6;
  double weight_decay = 0.0;  // an L2 term added to the gradient
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("rho", rho);
    visit("eps", eps);
    visit("weight_decay", weight_decay);
    visit("maximize", maximize);
  }
};

struct Adadelta {
  using Config = AdadeltaConfig;
  static constexpr const char* kName = "adadelta";
  static constexpr int kStateCount = 2;
  static constexpr StateSpec kStates[] = {{"square_avg", Values::sum_of_squares},
                                          {"acc_delta", Values::sum_of_squares}};

  struct Factors {
    float l2;
    float rho;
    float one_minus_rho;
    float eps;
    float minus_lr;
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  static Factors factors(const Config& c, int64_t) {
    return {.l2 = static_cast<float>(c.weight_decay),
            .rho = static_cast<float>(c.rho),
            .one_minus_rho = static_cast<float>(1.0 - c.rho),
            .eps = static_cast<float>(c.eps),
            .minus_lr = -static_cast<float>(c.lr)};
  }
  static float initial(const Config&, int) { return 0; }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V* state) {
    V &squares = state[0], &moved = state[1];
    if (nonzero(f.l2)) g = fma(V(f.l2), p, g);
    squares = fma(V(f.one_minus_rho), g * g, squares * f.rho);
    const V delta = sqrt(moved + f.eps) / sqrt(squares + f.eps) * g;
    moved = fma(V(f.one_minus_rho), delta * delta, moved * f.rho);
    p = fma(V(f.minus_lr), delta, p);
  }
};

}  // namespace overspill::optim
