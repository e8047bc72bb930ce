// Lion: Chen et al. 2023 (arXiv 2302.06675), algorithm 2. Decay is decoupled.
#pragma once

#include <cstdint>

#include "cpu_optim/optimizers/state.h"

namespace overspill::optim {

struct LionConfig {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("beta1", beta1);
    visit("beta2", beta2);
    visit("weight_decay", weight_decay);
    visit("maximize", maximize);
  }
};

struct Lion {
  using Config = LionConfig;
  static constexpr const char* kName = "lion";
  static constexpr int kStateCount = 1;
  static constexpr StateSpec kStates[] = {{"m", Values::any}};

  struct Factors {
    float decay;  // 1 - lr * weight_decay
    float one_minus_beta1;
    float one_minus_beta2;
    float minus_lr;
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  static Factors factors(const Config& c, int64_t) {
    return {.decay = static_cast<float>(1.0 - c.lr * c.weight_decay),
            .one_minus_beta1 = static_cast<float>(1.0 - c.beta1),
            .one_minus_beta2 = static_cast<float>(1.0 - c.beta2),
            .minus_lr = -static_cast<float>(c.lr)};
  }
  static float initial(const Config&, int) { return 0; }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V* state) {
    V& m = state[0];
    const V direction = sign(fma(V(f.one_minus_beta1), g - m, m));
    p = fma(V(f.minus_lr), direction, p * f.decay);
    m = fma(V(f.one_minus_beta2), g - m, m);
  }
};

}  // namespace overspill::optim
