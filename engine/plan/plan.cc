#include "engine/plan/plan.h"

#include "engine/plan/plan_homes.h"
#include "engine/plan/plan_text.h"
#include "engine/plan/planner.h"

namespace overspill::engine {

DeviceTraits traits_of(kernels::Device& device, const Communicator& ranks) {
  const bool own_memory = !device.shares_host_memory();
  const kernels::DeviceKernels* kernels = device.kernels();
  return {!own_memory, kernels != nullptr ? kernels->formats() : kernels::Formats(),
          own_memory && ranks.device() == &device};
}

WeightPlace weight_place(const Layout& layout, const Plan& plan, const DeviceTraits& device, int32_t unit) {
  if (plan.on_device[unit]) return WeightPlace::device;
  if (plan.weights_on_nvme[unit]) return WeightPlace::nvme;
  return held_whole(layout, device, false) ? WeightPlace::whole_on_host : WeightPlace::host;
}

bool used_in_place(const Layout& layout, const Plan& plan, const DeviceTraits& device, int32_t unit) {
  if (plan.on_device[unit]) return layout.slices == 1;
  return !needs_gather(layout, device, plan.weights_on_nvme[unit]);
}

GradientRoute gradient_route(const Layout& layout, const Plan& plan, int32_t unit) {
  if (plan.on_device[unit] && layout.slices == 1) return GradientRoute::device;
  if (plan.gradients_pooled) return GradientRoute::pooled;
  const Unit& u = layout.units[unit];
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    if (plan.gradients_on_nvme[c]) return GradientRoute::by_chunk;
  }
  return GradientRoute::whole;
}

bool needs_gather(const Layout& layout, const DeviceTraits& device, bool weights_on_nvme) {
  if (held_whole(layout, device, weights_on_nvme)) return false;
  return weights_on_nvme || layout.shards > 1 || !device.shares_host_memory;
}

bool meets_on_host(const Layout& layout, const DeviceTraits& device) {
  return device.shares_host_memory || (layout.shards > 1 && !device.gathers);
}

int64_t host_block_bytes(const Layout& layout, const Unit& unit, const DeviceTraits& device,
                         bool weights_on_nvme) {
  if (!needs_gather(layout, device, weights_on_nvme)) return 0;
  if (meets_on_host(layout, device)) return unit.bytes();
  return weights_on_nvme ? unit.shard_bytes() : 0;
}

bool held_whole(const Layout& layout, const DeviceTraits& device, bool weights_on_nvme) {
  return layout.shards > 1 && !layout.policy.divide_weights && device.shares_host_memory && !weights_on_nvme;
}

optim::Element gradient_element(optim::Format format, int64_t gradient_accumulation) {
  if (format == optim::Format::fp32 || gradient_accumulation > 1) return optim::Element::fp32;
  return format == optim::Format::fp16 ? optim::Element::fp16 : optim::Element::bf16;
}

int64_t gradient_element_bytes(UnitFormat format, int64_t gradient_accumulation) {
  return format ? optim::bytes(gradient_element(*format, gradient_accumulation)) : 0;
}

bool may_live_on_device(const Unit& unit, const DeviceTraits& device) {
  return unit.trainable() && device.updates[static_cast<size_t>(*unit.format)];
}

bool may_guess(const Plan& plan, int32_t chunk) {
  return plan.held_twice[chunk] || (plan.states_on_nvme[chunk] && !plan.gradients_on_nvme[chunk]);
}

Plan make_plan(const Layout& layout, const Config& config, const DeviceTraits& device) {
  Plan plan = place(layout, config, device);
  plan.holdings = holdings_of(layout);
  plan.homes = homes_of(layout, plan, device);
  return plan;
}

}  // namespace overspill::engine
