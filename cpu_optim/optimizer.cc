#include "cpu_optim/optimizer.h"

#include <stdexcept>
#include <string>

#include "cpu_optim/floating_point.h"

namespace overspill::optim {

std::string_view name(Optimizer optimizer) {
  std::string_view found;
  Optimizers::for_each([&]<class T>(int i) {
    if (i == static_cast<int>(optimizer)) found = T::kName;
  });
  if (found.empty()) {
    throw std::invalid_argument("there is no optimizer " + std::to_string(static_cast<int>(optimizer)));
  }
  return found;
}

Optimizer optimizer_named(std::string_view name) {
  int found = -1;
  std::string known;
  Optimizers::for_each([&]<class T>(int i) {
    if (T::kName == name) found = i;
    known += std::string(known.empty() ? "" : ", ") + T::kName;
  });
  if (found < 0)
    throw std::invalid_argument("unknown optimizer '" + std::string(name) + "'; known: " + known);
  return Optimizer{static_cast<uint8_t>(found)};
}

float initial_state(const Hyper& hyper, int state) {
  float value = 0;
  Optimizers::for_each([&]<class T>(int) {
    if (const auto* config = std::get_if<typename T::Config>(&hyper)) value = T::initial(*config, state);
  });
  return value;
}

Factors make_factors(const Hyper& hyper, int64_t step, double grad_scale) {
  if (step < 1) {
    throw std::invalid_argument("make_factors: step is " + std::to_string(step) + "; steps count from 1");
  }
  const FloatingPointMode mode;
  Factors result;
  Optimizers::for_each([&]<class T>(int) {
    const auto* config = std::get_if<typename T::Config>(&hyper);
    if (config == nullptr) return;
    result.of = T::factors(*config, step);
    result.grad_scale = static_cast<float>(config->maximize ? -grad_scale : grad_scale);
  });
  result.step = step;
  return result;
}

}  // namespace overspill::optim
