// Stochastic gradient descent as torch.optim.SGD computes it: plain, which has no state, and with momentum
// (Polyak 1964; Nesterov's form after Sutskever et al. 2013).
#pragma once

#include <cstdint>

#include "cpu_optim/optimizers/state.h"

namespace overspill::optim {

struct SgdConfig {
  double lr = 1e-3;
  double weight_decay = 0.0;  // an L2 term added to the gradient
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("weight_decay", weight_decay);
    visit("maximize", maximize);
  }
};

struct Sgd {
  using Config = SgdConfig;
  static constexpr const char* kName = "sgd";
  static constexpr int kStateCount = 0;
  static constexpr StateSpec kStates[] = {{nullptr, Values::any}};  // none

  struct Factors {
    float l2;
    float minus_lr;
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  static Factors factors(const Config& c, int64_t) {
    return {.l2 = static_cast<float>(c.weight_decay), .minus_lr = -static_cast<float>(c.lr)};
  }
  static float initial(const Config&, int) { return 0; }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V*) {
    if (nonzero(f.l2)) g = fma(V(f.l2), p, g);
    p = fma(V(f.minus_lr), g, p);
  }
};

/// Groups of one model share a layout: a group whose momentum is 0 may be among groups that have one, and is
/// updated as torch would, without dampening.
struct MomentumConfig {
  double lr = 1e-3;
  double momentum = 0.9;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("momentum", momentum);
    visit("dampening", dampening);
    visit("weight_decay", weight_decay);
    visit("nesterov", nesterov);
    visit("maximize", maximize);
  }
};

struct Momentum {
  using Config = MomentumConfig;
  static constexpr const char* kName = "momentum";
  static constexpr int kStateCount = 1;
  static constexpr StateSpec kStates[] = {{"momentum_buffer", Values::any}};

  struct Factors {
    float l2;
    float momentum;
    float gradient;   // 1 - dampening; 1 in the first step, as torch starts the buffer with the gradient
    float lookahead;  // Nesterov's momentum, else 0
    float minus_lr;
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  static Factors factors(const Config& c, int64_t step) {
    const bool dampened = step > 1 && c.momentum != 0;
    return {.l2 = static_cast<float>(c.weight_decay),
            .momentum = static_cast<float>(c.momentum),
            .gradient = dampened ? static_cast<float>(1.0 - c.dampening) : 1.0f,
            .lookahead = c.nesterov ? static_cast<float>(c.momentum) : 0.0f,
            .minus_lr = -static_cast<float>(c.lr)};
  }
  static float initial(const Config&, int) { return 0; }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V* state) {
    V& buffer = state[0];
    if (nonzero(f.l2)) g = fma(V(f.l2), p, g);
    buffer = fma(V(f.gradient), g, buffer * f.momentum);
    const V direction = nonzero(f.lookahead) ? fma(V(f.lookahead), buffer, g) : buffer;
    p = fma(V(f.minus_lr), direction, p);
  }
};

}  // namespace overspill::optim
