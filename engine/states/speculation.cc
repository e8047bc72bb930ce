#include "engine/states/speculation.h"

#include <algorithm>

namespace overspill::engine {

Speculation::Speculation(const Setup& setup, Hardware& hardware, ModelStates& model)
    : setup_(setup),
      model_(model),
      memory_(hardware.host_budget, setup.plan.second_weights * setup.plan.second_weights_bytes,
              "second weights of guessed updates") {
  for (int64_t i = 0; i < setup.plan.second_weights; ++i)
    free_.push_back(memory_.data() + i * setup.plan.second_weights_bytes);
  for (const Unit& unit : setup.layout.units) {
    arrivals_.emplace_back(unit.segments.size());
    expected_.emplace_back(unit.segments.size());
  }
}

void Speculation::expect(std::span<const optim::Hyper> groups) {
  groups_.assign(groups.begin(), groups.end());
}

void Speculation::expect_unscaled(double unscale) {
  unscale_ = unscale;
}

bool Speculation::arrived(int32_t unit, int32_t segment) {
  ++arrivals_[unit][segment];
  if (!active() || !complete(unit)) return false;
  capture(unit);
  return true;
}

bool Speculation::complete(int32_t unit) const {
  return arrivals_[unit] == expected_[unit];
}

void Speculation::capture(int32_t unit) {
  UnitState& state = model_.units[unit];
  const auto& segments = setup_.layout.units[unit].segments;
  for (size_t s = 0; s < segments.size(); ++s) {
    state.guessed[s] = arrivals_[unit][s] > 0 ? 1 : 0;
    if (state.guessed[s] == 0) continue;
    state.guessed_factors[s] = optim::make_factors(groups_[segments[s].group], state.steps[s] + 1, unscale_);
  }
}

bool Speculation::right(int32_t unit) const {
  const UnitState& state = model_.units[unit];
  if (state.guessed != state.updated) return false;
  for (size_t s = 0; s < state.guessed.size(); ++s) {
    if (state.guessed[s] != 0 && state.guessed_factors[s] != state.factors[s]) return false;
  }
  return true;
}

void Speculation::restart() {
  for (auto& unit : arrivals_) std::fill(unit.begin(), unit.end(), 0);
}

void Speculation::stepped(bool any_made, bool hit) {
  std::swap(expected_, arrivals_);
  restart();
  if (pause_ > 0) --pause_;
  if (!any_made) return;
  if (hit) {
    next_pause_ = 1;
    return;
  }
  pause_ = next_pause_;
  next_pause_ = std::min(2 * next_pause_, kPauseMost);
}

std::byte* Speculation::take_weights() {
  if (free_.empty()) return nullptr;
  std::byte* taken = free_.back();
  free_.pop_back();
  return taken;
}

void Speculation::give_back(std::byte* weights) {
  if (weights != nullptr) free_.push_back(weights);
}

}  // namespace overspill::engine
