// What an engine was built for: the model's layout, the plan, the configuration, and what the device can do.
// All of it is constant, so any thread may read it without a lock.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/base/config.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"

namespace overspill::engine {

struct Setup {
  Setup(Layout layout_in, Plan plan_in, Config config_in, DeviceTraits traits_in);

  const Layout layout;
  const Plan plan;
  const Config config;
  const DeviceTraits traits;

  WeightPlace weight_place(int32_t unit) const { return weight_places_[unit]; }
  bool lives_on_device(int32_t unit) const { return weight_place(unit) == WeightPlace::device; }
  GradientRoute gradient_route(int32_t unit) const { return gradient_routes_[unit]; }
  bool used_in_place(int32_t unit) const { return engine::used_in_place(layout, plan, traits, unit); }
  bool on_nvme(int32_t chunk, Component component) const {
    return component == Component::hi ? plan.weights_on_nvme[layout.chunks[chunk].unit]
                                      : plan.states_on_nvme[chunk];
  }
  /// The chunk has such a component, and it lives in extents.
  bool in_store(int32_t chunk, Component component) const {
    return on_nvme(chunk, component) && component_bytes(chunk, component) > 0;
  }
  bool touches_nvme(int32_t chunk) const {
    return plan.weights_on_nvme[layout.chunks[chunk].unit] || plan.states_on_nvme[chunk] ||
           plan.gradients_on_nvme[chunk];
  }
  /// The type of a trainable unit's gradients.
  optim::Element gradient_type(int32_t unit) const {
    return gradient_element(*layout.units[unit].format, config.gradient_accumulation);
  }
  /// Bytes of one element of them; 0 where the unit is frozen.
  int64_t gradient_width(int32_t unit) const {
    return gradient_element_bytes(layout.units[unit].format, config.gradient_accumulation);
  }
  /// An upper bound: a spilled gradient may have narrower elements.
  int64_t gradient_bytes(int32_t chunk) const {
    const Chunk& c = layout.chunks[chunk];
    return c.elements * gradient_width(c.unit);
  }
  int64_t component_bytes(int32_t chunk, Component component) const {
    const Chunk& c = layout.chunks[chunk];
    return layout.units[c.unit].component_bytes(component, c.elements);
  }
  /// The seed of the unit's stochastic rounding. It depends only on the unit's place in the model and the
  /// user's seed.
  uint64_t rounding_seed(int32_t unit) const {
    return config.rounding_seed * 1'000'003 + static_cast<uint64_t>(unit);
  }

 private:
  std::vector<WeightPlace> weight_places_;      // by unit
  std::vector<GradientRoute> gradient_routes_;  // by unit
};

}  // namespace overspill::engine
