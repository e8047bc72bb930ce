// The family: which optimizers there are, their hyper-parameters, and the factors of one update. A new one is
// a file in optimizers/ and a name in the list below; everything else follows from the list.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>
#include <variant>

#include "cpu_optim/optimizers/adadelta.h"
#include "cpu_optim/optimizers/adagrad.h"
#include "cpu_optim/optimizers/adam.h"
#include "cpu_optim/optimizers/adamax.h"
#include "cpu_optim/optimizers/lion.h"
#include "cpu_optim/optimizers/nadam.h"
#include "cpu_optim/optimizers/rmsprop.h"
#include "cpu_optim/optimizers/sgd.h"

namespace overspill::optim {

template <class... T>
struct OptimizerList {
  static constexpr int size = sizeof...(T);
  using Config = std::variant<typename T::Config...>;
  using Factors = std::variant<typename T::Factors...>;
  /// Calls f.template operator()<T>(index) for each.
  template <class F>
  static constexpr void for_each(F f) {
    int index = 0;
    (f.template operator()<T>(index++), ...);
  }
};
using Optimizers =
    OptimizerList<Adam, Adagrad, Lion, Momentum, Sgd, Rmsprop, RmspropMomentum, Nadam, Adamax, Adadelta>;

/// Hyper-parameters of one parameter group; which alternative it holds is which optimizer it is. A class, so
/// that a header may declare it without all optimizers.
struct Hyper : Optimizers::Config {
  using Optimizers::Config::variant::variant;
};

/// An optimizer, by its place in the list.
enum class Optimizer : uint8_t {};
constexpr int kOptimizerCount = Optimizers::size;

constexpr Optimizer optimizer_of(const Hyper& hyper) {
  return Optimizer{static_cast<uint8_t>(hyper.index())};
}
std::string_view name(Optimizer optimizer);
/// By the kName of its file in optimizers/, such as "adam"; anything else throws std::invalid_argument.
Optimizer optimizer_named(std::string_view name);

/// What a state (counted from 0) holds before the first update.
float initial_state(const Hyper& hyper, int state);

/// What one update needs besides memory: derived in double precision and rounded once, so it can be captured
/// and used later.
struct Factors {
  Optimizers::Factors of;
  float grad_scale = 1;  // clip factor / loss scale, negative for `maximize`; multiplies the gradient first
  int64_t step = 1;

  friend bool operator==(const Factors&, const Factors&) = default;
};

constexpr Optimizer optimizer_of(const Factors& factors) {
  return Optimizer{static_cast<uint8_t>(factors.of.index())};
}

/// `step` counts the updates of these elements from 1; anything less throws std::invalid_argument.
Factors make_factors(const Hyper& hyper, int64_t step, double grad_scale);

}  // namespace overspill::optim
