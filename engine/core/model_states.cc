#include "engine/core/model_states.h"

#include <fmt/format.h>

#include <stdexcept>

namespace overspill::engine {
namespace {

bool allowed(Residency from, Residency to) {
  switch (to) {
    case Residency::reading:
      return from == Residency::home;
    case Residency::staged:
      return from == Residency::reading;
    case Residency::updating:
      return from == Residency::staged || from == Residency::home;
    case Residency::writing:
      return from == Residency::updating;
    case Residency::home:
      return from != Residency::reading && from != Residency::home;
  }
  return false;
}

/// Carves an arena: weights and gradients of a unit are contiguous, states lie chunk by chunk.
class Carver {
 public:
  explicit Carver(std::byte* next) : next_(next) {}
  std::byte* take(int64_t bytes) {
    std::byte* taken = next_;
    next_ += bytes;
    return taken;
  }

 private:
  std::byte* next_;
};

}  // namespace

void ChunkState::become(Residency next) {
  if (!allowed(residency, next)) {
    throw std::logic_error(fmt::format("chunk residency: {} cannot become {}", static_cast<int>(residency),
                                       static_cast<int>(next)));
  }
  residency = next;
}

ModelStates::ModelStates(const Setup& setup, Hardware& hardware)
    : units(setup.layout.units.size()),
      chunks(setup.layout.chunks.size()),
      linked_(hardware.device(), hardware.host_budget,
              setup.plan.weights_host_bytes + setup.plan.gradients_host_bytes, "weights and gradients"),
      states_(hardware.host_budget, setup.plan.states_host_bytes, "states"),
      second_(hardware.host_budget, setup.plan.held_twice_bytes, "second versions of guessed updates") {
  Carver carver(linked_.data());
  Carver states_carver(states_.data()), second_carver(second_.data());
  for (size_t u = 0; u < units.size(); ++u) {
    const Unit& unit = setup.layout.units[u];
    UnitState& state = units[u];
    state.factors.resize(unit.segments.size());
    state.updated.resize(unit.segments.size());
    state.steps.resize(unit.segments.size());
    state.guessed.resize(unit.segments.size());
    state.guessed_factors.resize(unit.segments.size());
    const auto number = static_cast<int32_t>(u);
    switch (setup.weight_place(number)) {
      case WeightPlace::host:
        state.home = carver.take(unit.shard_bytes());
        break;
      case WeightPlace::whole_on_host:
        state.whole = carver.take(unit.bytes());
        state.home = state.whole + setup.layout.shard * unit.shard_bytes();
        state.gathered = Gathered::local;
        break;
      case WeightPlace::nvme:
        break;
      case WeightPlace::device:
        continue;  // its states and gradients live there too
    }
    carve_gradients(setup, number, carver);
    for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      if (state.home != nullptr)
        chunks[c].home[0] = state.home + setup.layout.chunks[c].begin * unit.element_bytes;
      for (Component component : kAllComponents) {
        const int64_t bytes = setup.plan.held_twice[c] ? setup.component_bytes(c, component) : 0;
        if (bytes > 0) chunks[c].second[static_cast<size_t>(component)] = second_carver.take(bytes);
      }
      if (setup.plan.states_on_nvme[c]) continue;
      for (Component component : kAllComponents) {
        const int64_t bytes = component == Component::hi ? 0 : setup.component_bytes(c, component);
        if (bytes > 0) chunks[c].home[static_cast<size_t>(component)] = states_carver.take(bytes);
      }
    }
  }
  if (carver.take(0) != linked_.data() + linked_.bytes() ||
      states_carver.take(0) != states_.data() + states_.bytes() ||
      second_carver.take(0) != second_.data() + second_.bytes()) {
    throw std::logic_error("the arenas' sizes differ from what the plan carves out of them");
  }
}

/// A unit's gradients lie together where none of them is spilled, and where they are not summed as they come.
template <class Carver>
void ModelStates::carve_gradients(const Setup& setup, int32_t u, Carver& carver) {
  const Unit& unit = setup.layout.units[u];
  UnitState& state = units[u];
  const int64_t element_bytes = gradient_element_bytes(unit.format, setup.config.gradient_accumulation);
  const bool in_parts = setup.gradient_route(u) != GradientRoute::whole;
  if (!in_parts) state.gradients = carver.take(unit.elements * element_bytes);
  for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
    if (unit.trainable())
      chunks[c].gradient_element = gradient_element(*unit.format, setup.config.gradient_accumulation);
    if (!in_parts) {
      chunks[c].gradient =
          state.gradients + setup.layout.global_begin(setup.layout.chunks[c]) * element_bytes;
    } else if (!setup.plan.gradients_on_nvme[c]) {
      chunks[c].gradient = carver.take(setup.gradient_bytes(c));  // of this rank's shard
    }
  }
}

}  // namespace overspill::engine
