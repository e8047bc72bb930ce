// Adagrad: Duchi, Hazan and Singer 2011 (JMLR 12), the diagonal form, as torch.optim.Adagrad computes it.
#pragma once

#include <cstdint>

#include "cpu_optim/optimizers/state.h"

namespace overspill::optim {

/// As torch.optim.Adagrad names them.
struct AdagradConfig {
  double lr = 1e-2;
  double lr_decay = 0.0;
  double weight_decay = 0.0;  // an L2 term added to the gradient
  double initial_accumulator_value = 0.0;
  double eps = 1e-10;
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("lr_decay", lr_decay);
    visit("weight_decay", weight_decay);
    visit("initial_accumulator_value", initial_accumulator_value);
    visit("eps", eps);
    visit("maximize", maximize);
  }
};

struct Adagrad {
  using Config = AdagradConfig;
  static constexpr const char* kName = "adagrad";
  static constexpr int kStateCount = 1;
  static constexpr StateSpec kStates[] = {{"sum", Values::sum_of_squares}};

  struct Factors {
    float l2;
    float minus_step_size;  // -lr / (1 + (step - 1) * lr_decay)
    float eps;
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  static Factors factors(const Config& c, int64_t step) {
    return {.l2 = static_cast<float>(c.weight_decay),
            .minus_step_size = -static_cast<float>(c.lr / (1.0 + static_cast<double>(step - 1) * c.lr_decay)),
            .eps = static_cast<float>(c.eps)};
  }
  static float initial(const Config& c, int) { return static_cast<float>(c.initial_accumulator_value); }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V* state) {
    V& sum = state[0];
    if (nonzero(f.l2)) g = fma(V(f.l2), p, g);
    sum = fma(g, g, sum);
    p = fma(V(f.minus_step_size), g / (sqrt(sum) + f.eps), p);
  }
};

}  // namespace overspill::optim
