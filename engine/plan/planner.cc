#include "engine/plan/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "engine/memory/budget.h"
#include "engine/plan/plan_sizes.h"

namespace overspill::engine {
namespace {

constexpr int64_t kRingSlotsMost = 64;  // enough read ahead to outlast the disk's pauses (docs/step.md),
constexpr int64_t kChunksPerSlot = 8;   // but of so many chunks one: the others' states are better at home
constexpr size_t kSpareUnits = 2;       // of the gather arena, beside the three that are held at once

/// Tries placements until one fits.
class Planner {
 public:
  Planner(const Layout& layout, const Config& config, const DeviceTraits& device)
      : layout_(layout), config_(config), device_(device), sizes_(layout, config, device, plan_) {
    plan_.host_budget_bytes = config.host_budget_bytes;
    plan_.activations_host_bytes = config.activations_bytes;
    plan_.weights_on_nvme.assign(layout.units.size(), false);
    plan_.states_on_nvme.assign(layout.chunks.size(), false);
    plan_.gradients_on_nvme.assign(layout.chunks.size(), false);
    plan_.on_device.assign(layout.units.size(), false);
    plan_.summed_on_device.assign(layout.units.size(), false);
    plan_.held_twice.assign(layout.chunks.size(), false);
    // Of micro-batches one after another they are complete only in the last one: they are held whole.
    plan_.gradients_pooled = layout.slices > 1 && layout.policy.sum_early &&
                             (config.gradient_accumulation == 1 || config.micro_batches_together);
  }

  Plan make() {
    place_on_device();
    switch (config_.placement) {
      case Placement::host:
      case Placement::device:
        break;
      case Placement::half:
        spill_every(2);
        // Of four chunks: states, gradients, both, none.
        spill_gradients_where([](size_t c) { return c % 4 == 1 || c % 4 == 2; });
        break;
      case Placement::nvme:
        spill_every(1);
        spill_gradients_where([](size_t) { return true; });
        break;
      case Placement::automatic:
        relieve_the_host();
        place_by_budget();
        break;
    }
    sizes_.size_up();
    shrink_buffers();
    hold_twice();
    check();
    for (size_t u = 0; u < layout_.units.size(); ++u) plan_.summed_on_device[u] = sizes_.summed_there(u);
    return plan_;
  }

 private:
  /// Those of the first units that the device's budget takes beside the weights of all others.
  void place_on_device() {
    const bool forced_there = config_.placement == Placement::device;
    const bool ranks = layout_.slices > 1;
    if (device_.shares_host_memory || device_.updates.none() || (ranks && !sizes_.may_sum_on_device()))
      return;
    const bool squared = square_there();
    if (forced() ? !forced_there : config_.device_budget_bytes == 0) return;
    if (!squared) return;  // what lives there is squared there
    // Of several ranks what lives there is summed there too, in as much as that may take.
    if (ranks) sizes_.size_up_gradient_pool(true);
    int64_t left = std::numeric_limits<int64_t>::max();
    if (config_.device_budget_bytes > 0)
      left = config_.device_budget_bytes - plan_.squares_device_bytes - (ranks ? sizes_.sums_bytes() : 0);
    int64_t others = 0;  // what those need that do not live there; of several ranks, what all need
    for (const Unit& unit : layout_.units)
      others += sizes_.gathered_bytes(unit) + sizes_.accumulator_bytes(unit);
    int64_t living = 0;
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      const Unit& unit = layout_.units[u];
      if (!may_live_on_device(unit, device_)) continue;
      const int64_t more = sizes_.living_bytes(unit);
      const int64_t without =
          others - (ranks ? 0 : sizes_.gathered_bytes(unit) + sizes_.accumulator_bytes(unit));
      if (living + more + sizes_.device_scratch_bytes() > left - without) continue;
      plan_.on_device[u] = true;
      living += more;
      others = without;
    }
    if (living > 0) plan_.units_device_bytes = living + sizes_.device_scratch_bytes();
    if (ranks) {
      if (living == 0) plan_.squares_device_bytes = 0;
      return;
    }
    left -= plan_.units_device_bytes;
    for (size_t u = 0; u < layout_.units.size(); ++u)
      left -= plan_.on_device[u] ? 0 : sizes_.gathered_bytes(layout_.units[u]);
    sum_on_device(left);
  }

  /// More units live on the device while the host budget cannot hold the rest: the arena there gives up
  /// weights that are not in use. To copy a weight once more costs the link 2 bytes; states that go to NVMe
  /// cost the disk 24, and without NVMe there would be no plan.
  void relieve_the_host() {
    if (layout_.slices > 1 || plan_.squares_device_bytes == 0 || device_.updates.none()) return;
    sizes_.size_up();
    const int64_t in_use = held_at_once(sizes_.gathered_sizes(), static_cast<size_t>(config_.prefetch_units));
    for (size_t u = 0; u < layout_.units.size() && !fits(); ++u) {
      const Unit& unit = layout_.units[u];
      if (plan_.on_device[u] || !may_live_on_device(unit, device_)) continue;
      const int64_t more =
          sizes_.living_bytes(unit) + (plan_.units_device_bytes == 0 ? sizes_.device_scratch_bytes() : 0);
      const int64_t less = sizes_.summed_there(u) ? sizes_.accumulator_bytes(unit) : 0;
      if (in_use + plan_.kept_device_bytes() + more - less > config_.device_budget_bytes) continue;
      plan_.on_device[u] = true;
      plan_.summed_on_device[u] = false;
      plan_.units_device_bytes += more;
      sizes_.size_up();
    }
  }

  /// Where that leaves room for the weights that are used together.
  bool square_there() {
    int64_t squares = 0;
    for (const Unit& unit : layout_.units) squares += sizes_.squares_bytes(unit);
    const int64_t most = config_.device_budget_bytes;
    const bool fits = most == 0 || held_at_once(sizes_.gathered_sizes(), 0) + squares <= most;
    if (fits) plan_.squares_device_bytes = squares;
    return fits;
  }

  /// Of the first units, as many as `left` takes.
  void sum_on_device(int64_t left) {
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      const int64_t bytes = sizes_.accumulator_bytes(layout_.units[u]);
      if (bytes == 0 || plan_.on_device[u]) continue;
      if (bytes > left) return;
      left -= bytes;
      plan_.summed_on_device[u] = true;
    }
  }

  void spill_every(size_t stride) {
    for (size_t u = 0; u < layout_.units.size(); ++u)
      plan_.weights_on_nvme[u] = u % stride == 0 && !plan_.on_device[u];
    for (size_t c = 0; c < layout_.chunks.size(); ++c)
      plan_.states_on_nvme[c] = c % stride == 0 && states_bytes(layout_, c) > 0 && !sizes_.on_device(c);
  }

  /// Ranks exchange whole gradients, and guesses read them in memory: both need them on the host.
  template <class Which>
  void spill_gradients_where(Which which) {
    for (size_t c = 0; c < layout_.chunks.size(); ++c) {
      plan_.gradients_on_nvme[c] = layout_.slices == 1 && !(forced() && config_.speculate) &&
                                   sizes_.gradient_bytes(c) > 0 && !sizes_.on_device(c) && which(c);
    }
  }

  bool forced() const { return config_.placement != Placement::automatic; }

  /// Everything on NVMe; gradients only where their staging takes less than they do.
  void spill_all() {
    spill_every(1);
    sizes_.slots = kRingSlotsLeast;
    sizes_.size_up();
    const int64_t with_gradients_home = plan_.host_bytes();
    spill_gradients_where([](size_t) { return true; });
    sizes_.size_up();
    if (!forced() && plan_.host_bytes() >= with_gradients_home)
      spill_gradients_where([](size_t) { return false; });
  }

  bool fits() const { return plan_.host_bytes() <= config_.host_budget_bytes; }

  /// From everything on the host to everything on NVMe, then back as far as the budget allows.
  void place_by_budget() {
    sizes_.size_up();
    if (fits() || config_.nvme.empty()) return;
    sizes_.second_weights_most = 0;
    spill_all();
    spare_units();
    // Weights in order of use. The gather arena goes when the last one is home, so all of them together are
    // tried first.
    std::fill(plan_.weights_on_nvme.begin(), plan_.weights_on_nvme.end(), false);
    sizes_.size_up();
    if (!fits()) {
      plan_.weights_on_nvme = plan_.on_device;
      plan_.weights_on_nvme.flip();
      size_ring_beside_weights();
      for (size_t u = 0; u < layout_.units.size(); ++u) bring_home(plan_.weights_on_nvme, u);
    }
    grow_ring(kRingSlotsBest);
    bring_gradients_home();
    speculate_within_budget();
    const auto chunks = std::count(plan_.states_on_nvme.begin(), plan_.states_on_nvme.end(), true);
    grow_ring(std::min(kRingSlotsMost, chunks / kChunksPerSlot));
    bring_states_home();
  }

  /// Units that are leased cannot be moved, so the arena may have the bytes for one more and no run of them.
  /// Three units of about one size leave a run for a fourth wherever they lie, if the arena has room for
  /// five.
  void spare_units() {
    for (sizes_.spare_units = kSpareUnits; sizes_.spare_units > 0; --sizes_.spare_units) {
      sizes_.size_up();
      if (fits()) return;
    }
    sizes_.size_up();
  }

  void grow_ring(int64_t most) {
    while (sizes_.slots < most) {
      ++sizes_.slots;
      sizes_.size_up();
      if (fits()) continue;
      --sizes_.slots;
      return sizes_.size_up();
    }
  }

  /// Where not all weights come home: what they give up to buffers of the best size moves a few bytes more,
  /// and everything that is moved needs the buffers.
  void size_ring_beside_weights() {
    sizes_.slots = kRingSlotsBest;
    sizes_.size_up();
    if (plan_.host_bytes() > config_.host_budget_bytes / 4) sizes_.slots = kRingSlotsLeast;
  }

  /// Second weights for as many chunks as there is room for.
  void speculate_within_budget() {
    sizes_.second_weights_most = 0;
    sizes_.size_up();
    const int64_t left = std::max<int64_t>(0, config_.host_budget_bytes - plan_.host_bytes());
    if (plan_.second_weights_bytes > 0) sizes_.second_weights_most = left / plan_.second_weights_bytes;
    sizes_.size_up();
  }

  void bring_home(std::vector<bool>& on_nvme, size_t index) {
    on_nvme[index] = false;
    sizes_.size_up();
    on_nvme[index] = !fits();
  }

  /// All, where that and no staging fits; else as many as fit.
  void bring_gradients_home() {
    const std::vector<bool> spilled = plan_.gradients_on_nvme;
    spill_gradients_where([](size_t) { return false; });
    sizes_.size_up();
    if (fits()) return;
    plan_.gradients_on_nvme = spilled;
    bring_prefix_home(plan_.gradients_on_nvme, [&](size_t c) { return sizes_.gradient_bytes(c); });
  }

  /// The first units of forward have nothing to hide under.
  void bring_states_home() {
    bring_prefix_home(plan_.states_on_nvme, [&](size_t c) { return states_bytes(layout_, c); });
  }

  /// The longest prefix of the chunks, in order of definition, that the budget takes.
  template <class Bytes>
  void bring_prefix_home(std::vector<bool>& on_nvme, Bytes bytes_of) {
    sizes_.size_up();
    int64_t left = config_.host_budget_bytes - plan_.host_bytes();
    for (size_t c = 0; c < layout_.chunks.size() && left > 0; ++c) {
      const int64_t bytes = bytes_of(c);
      if (bytes == 0 || !on_nvme[c]) continue;
      if (bytes > left) break;
      on_nvme[c] = false;
      left -= bytes;
    }
    sizes_.size_up();
  }

  /// The longest prefix of the chunks wholly on the host that the budget takes once more.
  void hold_twice() {
    if (!config_.speculate || device_.shares_host_memory || layout_.slices > 1) return;
    int64_t left = config_.host_budget_bytes - plan_.host_bytes();
    for (size_t c = 0; c < layout_.chunks.size(); ++c) {
      const Chunk& chunk = layout_.chunks[c];
      const Unit& unit = layout_.units[chunk.unit];
      const bool at_home = !plan_.weights_on_nvme[chunk.unit] && !plan_.states_on_nvme[c] &&
                           !plan_.gradients_on_nvme[c] && !sizes_.on_device(c);
      if (!unit.trainable() || !at_home) continue;
      const int64_t bytes =
          unit.component_bytes(Component::hi, chunk.elements) + unit.state_bytes(chunk.elements);
      if (bytes > left) return;
      left -= bytes;
      plan_.held_twice[c] = true;
      plan_.held_twice_bytes += bytes;
    }
  }

  /// Forced placements too keep to the budget: buffers shrink to their least before that is an error.
  void shrink_buffers() {
    while (!fits() && sizes_.slots > kRingSlotsLeast) {
      --sizes_.slots;
      sizes_.size_up();
    }
    if (!fits()) speculate_within_budget();
  }

  void check() const {
    if (plan_.nvme_bytes() > 0 && config_.nvme.empty()) {
      throw BudgetError("this placement needs NVMe: give a folder for it (budget.nvme, --nvme)");
    }
    if (plan_.activations_host_bytes > 0 && config_.nvme.empty())
      throw BudgetError(
          "budget.activations: what does not fit there goes to disk: give a folder for it (budget.nvme)");
    if (fits()) return;
    std::string way_out = config_.nvme.empty() ? " or give a folder on NVMe (budget.nvme, --nvme)" : "";
    Config all = config_;
    all.host_budget_bytes = 0;
    Planner least(layout_, all, device_);
    least.place_on_device();
    least.sizes_.second_weights_most = 0;
    least.sizes_.slots = kRingSlotsLeast;
    if (!forced()) least.relieve_the_host();
    if (!config_.nvme.empty()) least.spill_all();
    least.sizes_.size_up();
    const int64_t in_use = held_at_once(least.sizes_.gathered_sizes(), 0);
    if (2 * in_use > least.plan_.host_bytes() && layout_.slices == 1 && device_.shares_host_memory)
      way_out += ", or have the layers with the largest weights computed in tiles (budget.tile, --tile)";
    throw BudgetError(
        fmt::format("host budget too small: {} are needed, {} are allowed. {}the smallest budget that would "
                    "do is {} ({} bytes){}\n{}",
                    mib(plan_.host_bytes()), mib(config_.host_budget_bytes),
                    config_.nvme.empty() ? "Without NVMe " : "With all on NVMe ",
                    mib(least.plan_.host_bytes()), least.plan_.host_bytes(), way_out, plan_.text()));
  }

  const Layout& layout_;
  const Config& config_;
  const DeviceTraits& device_;
  Plan plan_;
  PlanSizes sizes_;
};

}  // namespace

Plan place(const Layout& layout, const Config& config, const DeviceTraits& device) {
  return Planner(layout, config, device).make();
}

}  // namespace overspill::engine
