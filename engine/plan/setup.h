// What an engine was built for: the model's layout, the plan, the configuration, and what the device can do.
// All of it is constant, so any thread may read it without a lock.
#pragma once

#include <cstdint>

#include "engine/base/config.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"

namespace overspill::engine {

struct Setup {
  const Layout layout;
  const Plan plan;
  const Config config;
  const DeviceTraits traits;

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
  /// Of the gradients that a trainable unit holds; gradient_width: bytes an element, 0 where it is frozen.
  optim::Element gradient_type(int32_t unit) const {
    return gradient_element(*layout.units[unit].format, config.gradient_accumulation);
  }
  int64_t gradient_width(int32_t unit) const {
    return gradient_element_bytes(layout.units[unit].format, config.gradient_accumulation);
  }
  /// At most: a spilled one may be narrower.
  int64_t gradient_bytes(int32_t chunk) const {
    const Chunk& c = layout.chunks[chunk];
    return c.elements * gradient_width(c.unit);
  }
  int64_t component_bytes(int32_t chunk, Component component) const {
    const Chunk& c = layout.chunks[chunk];
    return layout.units[c.unit].component_bytes(component, c.elements);
  }
  /// Of the unit's stochastic rounding: by the unit's place in the model and what the user gave, nothing
  /// else.
  uint64_t rounding_seed(int32_t unit) const {
    return config.rounding_seed * 1'000'003 + static_cast<uint64_t>(unit);
  }
  bool used_in_place(int32_t unit) const {
    const bool there = plan.on_device[unit] && layout.slices == 1;
    return there || !needs_gather(layout, traits, plan.weights_on_nvme[unit]);
  }
  bool held_whole(int32_t unit) const {
    return engine::held_whole(layout, traits, plan.weights_on_nvme[unit]);
  }
};

}  // namespace overspill::engine
