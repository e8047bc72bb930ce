#include "engine/plan/plan_homes.h"

#include <utility>

namespace overspill::engine {

std::vector<Plan::UnitHome> homes_of(const Layout& layout, const Plan& plan, const DeviceTraits& device) {
  std::vector<Plan::UnitHome> homes;
  for (size_t u = 0; u < layout.units.size(); ++u) {
    const Unit& unit = layout.units[u];
    Plan::UnitHome home;
    home.name = unit.name;
    home.trainable = unit.trainable();
    for (const Segment& segment : unit.segments) home.parameters += segment.parameters;
    const bool away = plan.weights_on_nvme[u];
    if (plan.on_device[u]) {
      home.weights.device = unit.shard_bytes();
    } else {
      (away ? home.weights.nvme : home.weights.host) =
          held_whole(layout, device, away) ? unit.bytes() : unit.shard_bytes();
    }
    homes.push_back(std::move(home));
  }
  for (size_t c = 0; c < layout.chunks.size(); ++c) {
    const Chunk& chunk = layout.chunks[c];
    Plan::Tiers& states = homes[chunk.unit].states;
    int64_t& home = plan.on_device[chunk.unit] ? states.device
                    : plan.states_on_nvme[c]   ? states.nvme
                                               : states.host;
    home += layout.units[chunk.unit].state_bytes(chunk.elements);
  }
  return homes;
}

}  // namespace overspill::engine
