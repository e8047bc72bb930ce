// RMSprop: Tieleman and Hinton 2012 (Coursera, Neural Networks for Machine Learning, lecture 6.5), as
// torch.optim.RMSprop computes it: plain, and with momentum.
#pragma once

#include <cstdint>

#include "cpu_optim/optimizers/state.h"

namespace overspill::optim {

/// As torch.optim.RMSprop names them.
struct RmspropConfig {
  double lr = 1e-2;
  double alpha = 0.99;  // decay of the average of squares
  double eps = 1e-8;
  double weight_decay = 0.0;  // an L2 term added to the gradient
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("alpha", alpha);
    visit("eps", eps);
    visit("weight_decay", weight_decay);
    visit("maximize", maximize);
  }
};

struct Rmsprop {
  using Config = RmspropConfig;
  static constexpr const char* kName = "rmsprop";
  static constexpr int kStateCount = 1;
  static constexpr StateSpec kStates[] = {{"square_avg", Values::sum_of_squares}};

  struct Factors {
    float l2;
    float alpha;
    float one_minus_alpha;
    float eps;
    float minus_lr;
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  static Factors factors(const Config& c, int64_t) {
    return {.l2 = static_cast<float>(c.weight_decay),
            .alpha = static_cast<float>(c.alpha),
            .one_minus_alpha = static_cast<float>(1.0 - c.alpha),
            .eps = static_cast<float>(c.eps),
            .minus_lr = -static_cast<float>(c.lr)};
  }
  static float initial(const Config&, int) { return 0; }

  /// The gradient over the root of its squares' average.
  template <class V>
  OVERSPILL_HERE_AND_THERE static V direction(const Factors& f, V p, V g, V& average) {
    if (nonzero(f.l2)) g = fma(V(f.l2), p, g);
    average = fma(V(f.one_minus_alpha), g * g, average * f.alpha);
    return g / (sqrt(average) + f.eps);
  }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V* state) {
    p = fma(V(f.minus_lr), direction(f, p, g, state[0]), p);
  }
};

/// Groups of one model share a layout: a group whose momentum is 0 may be among groups that have one; as in
/// torch, its buffer stays as it is.
struct RmspropMomentumConfig {
  double lr = 1e-2;
  double alpha = 0.99;
  double eps = 1e-8;
  double weight_decay = 0.0;  // an L2 term added to the gradient
  double momentum = 0.9;
  bool maximize = false;

  /// Calls visit(name, field) for each.
  template <class Visit>
  void for_each_field(Visit visit) {
    visit("lr", lr);
    visit("alpha", alpha);
    visit("eps", eps);
    visit("weight_decay", weight_decay);
    visit("momentum", momentum);
    visit("maximize", maximize);
  }
};

struct RmspropMomentum {
  using Config = RmspropMomentumConfig;
  static constexpr const char* kName = "rmsprop_momentum";
  static constexpr int kStateCount = 2;
  static constexpr StateSpec kStates[] = {{"square_avg", Values::sum_of_squares},
                                          {"momentum_buffer", Values::any}};

  struct Factors {
    Rmsprop::Factors plain;
    float momentum;
    friend bool operator==(const Factors&, const Factors&) = default;
  };

  static Factors factors(const Config& c, int64_t step) {
    const RmspropConfig plain{.lr = c.lr, .alpha = c.alpha, .eps = c.eps, .weight_decay = c.weight_decay};
    return {.plain = Rmsprop::factors(plain, step), .momentum = static_cast<float>(c.momentum)};
  }
  static float initial(const Config&, int) { return 0; }

  template <class V>
  OVERSPILL_HERE_AND_THERE static void update(const Factors& f, V& p, V g, V* state) {
    V step = Rmsprop::direction(f.plain, p, g, state[0]);
    if (nonzero(f.momentum)) step = state[1] = fma(V(f.momentum), state[1], step);
    p = fma(V(f.plain.minus_lr), step, p);
  }
};

}  // namespace overspill::optim
