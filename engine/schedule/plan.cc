#include "engine/schedule/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "engine/memory/budget.h"
#include "engine/schedule/plan_homes.h"

namespace overspill::engine {
namespace {

// Slots of the ring; where gradients are spilled, as many buffers for them, up to the best.
constexpr int64_t kRingSlotsLeast = 2;  // one being updated (filled), one in flight
constexpr int64_t kRingSlotsBest = 8;   // reads, an update a thread, and writes, all at once
constexpr int64_t kRingSlotsMost = 64;  // and enough read ahead to outlast the disk's pauses (docs/step.md),
constexpr int64_t kChunksPerSlot = 8;   // but of so many chunks one: the others' states are better at home
constexpr size_t kLeasedMost = 3;       // units that are held at once
// Pieces of gradients being copied from the device, or added: some of each, and enough to keep the link and
// all workers busy where the budget has room.
constexpr int64_t kIntakeSlotsLeast = 4;
constexpr int64_t kIntakeSlotsBest = 16;
constexpr int64_t kArenaAlign = 4096;
constexpr int64_t kMiB = 1 << 20;

int64_t aligned(int64_t bytes) {
  return (bytes + kArenaAlign - 1) / kArenaAlign * kArenaAlign;
}

std::string mib(int64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / kMiB);
}

int64_t states_bytes(const Layout& layout, size_t chunk) {
  const Chunk& c = layout.chunks[chunk];
  return layout.units[c.unit].state_bytes(c.elements);
}

/// Fills in everything that follows from where the components are.
class Planner {
 public:
  Planner(const Layout& layout, const Config& config, const DeviceTraits& device)
      : layout_(layout), config_(config), device_(device) {
    plan_.host_budget_bytes = config.host_budget_bytes;
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
    size_up();
    shrink_buffers();
    hold_twice();
    check();
    for (size_t u = 0; u < layout_.units.size(); ++u) plan_.summed_on_device[u] = summed_there(u);
    return plan_;
  }

 private:
  /// Those of the first units that the device's budget takes beside the weights of all others.
  void place_on_device() {
    const bool forced_there = config_.placement == Placement::device;
    const bool ranks = layout_.slices > 1;
    if (device_.shares_host_memory || device_.updates.none() || (ranks && !may_sum_on_device())) return;
    const bool squared = square_there();
    if (forced() ? !forced_there : config_.device_budget_bytes == 0) return;
    if (!squared) return;  // what lives there is squared there
    // Of several ranks what lives there is summed there too, in as much as that may take.
    if (ranks) size_up_gradient_pool(true);
    int64_t left = std::numeric_limits<int64_t>::max();
    if (config_.device_budget_bytes > 0)
      left = config_.device_budget_bytes - plan_.squares_device_bytes - (ranks ? sums_bytes() : 0);
    int64_t others = 0;  // what those need that do not live there; of several ranks, what all need
    for (const Unit& unit : layout_.units) others += gathered_bytes(unit) + accumulator_bytes(unit);
    int64_t living = 0;
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      const Unit& unit = layout_.units[u];
      if (!may_live_on_device(unit, device_)) continue;
      const int64_t more = living_bytes(unit);
      const int64_t without = others - (ranks ? 0 : gathered_bytes(unit) + accumulator_bytes(unit));
      if (living + more + device_scratch_bytes() > left - without) continue;
      plan_.on_device[u] = true;
      living += more;
      others = without;
    }
    if (living > 0) plan_.units_device_bytes = living + device_scratch_bytes();
    if (ranks) {
      if (living == 0) plan_.squares_device_bytes = 0;
      return;
    }
    left -= plan_.units_device_bytes;
    for (size_t u = 0; u < layout_.units.size(); ++u)
      left -= plan_.on_device[u] ? 0 : gathered_bytes(layout_.units[u]);
    sum_on_device(left);
  }

  /// More units live on the device while the host budget cannot hold the rest: the arena there gives up
  /// weights that are not in use. To copy a weight once more costs the link 2 bytes; states that go to NVMe
  /// cost the disk 24, and without NVMe there would be no plan.
  void relieve_the_host() {
    if (layout_.slices > 1 || plan_.squares_device_bytes == 0 || device_.updates.none()) return;
    size_up();
    auto gathered = gathered_sizes();
    const int64_t in_use = largest(gathered, kLeasedMost + static_cast<size_t>(config_.prefetch_units));
    for (size_t u = 0; u < layout_.units.size() && !fits(); ++u) {
      const Unit& unit = layout_.units[u];
      if (plan_.on_device[u] || !may_live_on_device(unit, device_)) continue;
      const int64_t more = living_bytes(unit) + (plan_.units_device_bytes == 0 ? device_scratch_bytes() : 0);
      const int64_t less = summed_there(u) ? accumulator_bytes(unit) : 0;
      if (in_use + plan_.kept_device_bytes() + more - less > config_.device_budget_bytes) continue;
      plan_.on_device[u] = true;
      plan_.summed_on_device[u] = false;
      plan_.units_device_bytes += more;
      size_up();
    }
  }

  /// Where that leaves room for the weights that are used together.
  bool square_there() {
    int64_t squares = 0;
    for (const Unit& unit : layout_.units) squares += squares_bytes(unit);
    auto gathered = gathered_sizes();
    const int64_t most = config_.device_budget_bytes;
    const bool fits = most == 0 || largest(gathered, kLeasedMost) + squares <= most;
    if (fits) plan_.squares_device_bytes = squares;
    return fits;
  }

  /// Of the first units, as many as `left` takes.
  void sum_on_device(int64_t left) {
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      const int64_t bytes = accumulator_bytes(layout_.units[u]);
      if (bytes == 0 || plan_.on_device[u]) continue;
      if (bytes > left) return;
      left -= bytes;
      plan_.summed_on_device[u] = true;
    }
  }

  static int64_t gathered_bytes(const Unit& unit) { return unit.bytes() + kArenaAlign; }
  int64_t accumulator_bytes(const Unit& unit) const {
    return layout_.slices > 1 ? 0 : engine::accumulator_bytes(unit, config_.gradient_accumulation);
  }

  /// Of one that lives on the device: this rank's components, and its gradient in flight.
  int64_t living_bytes(const Unit& unit) const {
    const int64_t elements = plan_.gradients_pooled ? unit.shard_elements : unit.elements;
    int64_t bytes = elements * gradient_element_bytes(unit.format, config_.gradient_accumulation);
    for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      bytes += unit.component_bytes(Component::hi, layout_.chunks[c].elements) +
               states_bytes(layout_, static_cast<size_t>(c));
    }
    return bytes;
  }

  /// For a piece of a gradient from the host: of one chunk. Sums of several ranks have their own.
  int64_t device_scratch_bytes() const {
    if (layout_.slices > 1) return 0;
    int64_t most = 0;
    for (const Chunk& chunk : layout_.chunks) most = std::max(most, chunk.elements);
    return most * 4;
  }

  /// Of a unit's gradients, block by block of each run.
  int64_t squares_bytes(const Unit& unit) const {
    if (!unit.trainable()) return 0;
    int64_t blocks = 0;
    for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      for (const Run& run : layout_.chunks[c].runs) blocks += kernels::squares_blocks(run.elements);
    }
    const int64_t bytes = blocks * static_cast<int64_t>(sizeof(kernels::Squares));
    return aligned(bytes);
  }

  bool on_device(size_t chunk) const { return plan_.on_device[layout_.chunks[chunk].unit]; }

  void spill_every(size_t stride) {
    for (size_t u = 0; u < layout_.units.size(); ++u)
      plan_.weights_on_nvme[u] = u % stride == 0 && !plan_.on_device[u];
    for (size_t c = 0; c < layout_.chunks.size(); ++c)
      plan_.states_on_nvme[c] = c % stride == 0 && states_bytes(layout_, c) > 0 && !on_device(c);
  }

  /// Ranks exchange whole gradients, and guesses read them in memory: both need them on the host.
  template <class Which>
  void spill_gradients_where(Which which) {
    for (size_t c = 0; c < layout_.chunks.size(); ++c) {
      plan_.gradients_on_nvme[c] = layout_.slices == 1 && !(forced() && config_.speculate) &&
                                   gradient_bytes(c) > 0 && !on_device(c) && which(c);
    }
  }
  bool forced() const { return config_.placement != Placement::automatic; }

  /// Of this rank's chunk; on the host all ranks' are held until they are reduced.
  int64_t gradient_bytes(size_t c) const {
    const Chunk& chunk = layout_.chunks[c];
    return chunk.elements *
           gradient_element_bytes(layout_.units[chunk.unit].format, config_.gradient_accumulation);
  }

  /// Everything on NVMe; gradients only where their staging takes less than they do.
  void spill_all() {
    spill_every(1);
    slots_ = kRingSlotsLeast;
    size_up();
    const int64_t with_gradients_home = plan_.host_bytes();
    spill_gradients_where([](size_t) { return true; });
    size_up();
    if (!forced() && plan_.host_bytes() >= with_gradients_home)
      spill_gradients_where([](size_t) { return false; });
  }

  bool fits() const { return plan_.host_bytes() <= config_.host_budget_bytes; }

  /// From everything on the host to everything on NVMe, then back as far as the budget allows.
  void place_by_budget() {
    size_up();
    if (fits() || config_.nvme.empty()) return;
    second_weights_most_ = 0;
    spill_all();
    // Weights in order of use. The gather arena goes when the last one is home, so all of them together are
    // tried first.
    std::fill(plan_.weights_on_nvme.begin(), plan_.weights_on_nvme.end(), false);
    size_up();
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

  void grow_ring(int64_t most) {
    while (slots_ < most) {
      ++slots_;
      size_up();
      if (fits()) continue;
      --slots_;
      return size_up();
    }
  }

  /// Where not all weights come home: what they give up to buffers of the best size moves a few bytes more,
  /// and everything that is moved needs the buffers.
  void size_ring_beside_weights() {
    slots_ = kRingSlotsBest;
    size_up();
    if (plan_.host_bytes() > config_.host_budget_bytes / 4) slots_ = kRingSlotsLeast;
  }

  /// Second weights for as many chunks as there is room for.
  void speculate_within_budget() {
    second_weights_most_ = 0;
    size_up();
    const int64_t left = std::max<int64_t>(0, config_.host_budget_bytes - plan_.host_bytes());
    if (plan_.second_weights_bytes > 0) second_weights_most_ = left / plan_.second_weights_bytes;
    size_up();
  }

  void bring_home(std::vector<bool>& on_nvme, size_t index) {
    on_nvme[index] = false;
    size_up();
    on_nvme[index] = !fits();
  }

  /// All, where that and no staging fits; else as many as fit.
  void bring_gradients_home() {
    const std::vector<bool> spilled = plan_.gradients_on_nvme;
    spill_gradients_where([](size_t) { return false; });
    size_up();
    if (fits()) return;
    plan_.gradients_on_nvme = spilled;
    bring_prefix_home(plan_.gradients_on_nvme, [&](size_t c) { return gradient_bytes(c); });
  }

  /// The first units of forward have nothing to hide under.
  void bring_states_home() {
    bring_prefix_home(plan_.states_on_nvme, [&](size_t c) { return states_bytes(layout_, c); });
  }

  /// The longest prefix of the chunks, in order of definition, that the budget takes.
  template <class Bytes>
  void bring_prefix_home(std::vector<bool>& on_nvme, Bytes bytes_of) {
    size_up();
    int64_t left = config_.host_budget_bytes - plan_.host_bytes();
    for (size_t c = 0; c < layout_.chunks.size() && left > 0; ++c) {
      const int64_t bytes = bytes_of(c);
      if (bytes == 0 || !on_nvme[c]) continue;
      if (bytes > left) break;
      on_nvme[c] = false;
      left -= bytes;
    }
    size_up();
  }

  int64_t slot_bytes(size_t c) const {
    const Chunk& chunk = layout_.chunks[c];
    const Unit& unit = layout_.units[chunk.unit];
    if (!unit.trainable() || plan_.on_device[chunk.unit]) return 0;
    const bool weights = plan_.weights_on_nvme[chunk.unit];
    return (weights ? unit.component_bytes(Component::hi, chunk.elements) : 0) +
           (plan_.states_on_nvme[c] ? unit.state_bytes(chunk.elements) : 0) +
           (plan_.gradients_on_nvme[c] ? gradient_bytes(c) : 0);
  }

  /// One component, or a sum, of the largest chunk.
  int64_t part_bytes() const {
    int64_t most = 0;
    for (const Chunk& chunk : layout_.chunks) {
      const int64_t width = std::max<int64_t>(4, layout_.units[chunk.unit].element_bytes);
      most = std::max(most, chunk.elements * width);
    }
    return most;
  }

  void size_up() {
    Plan& p = plan_;
    p.weights_host_bytes = p.states_host_bytes = p.gradients_host_bytes = p.ring_slot_bytes = 0;
    p.weights_nvme_bytes = p.states_nvme_bytes = p.gradients_nvme_bytes = 0;
    p.nvme_read_bytes_per_step = p.nvme_written_bytes_per_step = 0;
    p.staging_buffer_bytes = 0;
    const int64_t component_most = part_bytes();
    int64_t spilled_gradients = 0;
    int64_t gradients_moved = 0;  // each way
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      const Unit& unit = layout_.units[u];
      if (p.on_device[u]) continue;
      (p.weights_on_nvme[u] ? p.weights_nvme_bytes : p.weights_host_bytes) +=
          held_whole(layout_, device_, p.weights_on_nvme[u]) ? unit.bytes() : unit.shard_bytes();
      if (p.weights_on_nvme[u]) {
        p.nvme_read_bytes_per_step += 2 * unit.shard_bytes();  // forward (with the update) and backward
        if (unit.trainable()) p.nvme_written_bytes_per_step += unit.shard_bytes();
      }
    }
    for (size_t c = 0; c < layout_.chunks.size(); ++c) {
      if (on_device(c)) continue;
      const int64_t bytes = states_bytes(layout_, c);
      (p.states_on_nvme[c] ? p.states_nvme_bytes : p.states_host_bytes) += bytes;
      const Unit& unit = layout_.units[layout_.chunks[c].unit];
      p.ring_slot_bytes = std::max(p.ring_slot_bytes, slot_bytes(c));
      if (p.gradients_on_nvme[c]) {
        ++spilled_gradients;
        p.gradients_nvme_bytes += gradient_bytes(c);
        // The first micro-batch's is moved as it came, the sums in the width they are kept in.
        gradients_moved += layout_.chunks[c].elements * gradient_element_bytes(unit.format, 1) +
                           gradient_bytes(c) * (config_.gradient_accumulation - 1);
        p.staging_buffer_bytes = std::max(p.staging_buffer_bytes, gradient_bytes(c));
      } else {
        p.gradients_host_bytes += gradient_bytes(c) * (p.gradients_pooled ? 1 : layout_.world);
      }
    }
    p.nvme_read_bytes_per_step += p.states_nvme_bytes + gradients_moved;
    p.nvme_written_bytes_per_step += p.states_nvme_bytes + gradients_moved;
    p.ring_slots = p.ring_slot_bytes > 0 ? slots_ : 0;
    p.staging_buffers = std::min({slots_, kRingSlotsBest, spilled_gradients});
    size_up_second_weights();
    p.access_bytes = component_most;
    p.intake_slot_bytes = component_most;
    p.intake_slots = device_.shares_host_memory ? 0 : intake_slots(slots_ > kRingSlotsLeast);
    size_up_accumulators();
    p.exchange_bytes = layout_.slices > 1 ? (layout_.slices + 2) * component_most : 0;
    size_up_gradient_pool(slots_ > kRingSlotsLeast);
    p.serve_bytes = 0;
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      if (layout_.world > 1 && p.weights_on_nvme[u])
        p.serve_bytes = std::max(p.serve_bytes, layout_.units[u].shard_bytes());
    }
    place_sums();
    size_up_gather(slots_ > kRingSlotsLeast);
    const int64_t checkpoints = config_.train_after_save ? config_.checkpoints_kept + 1 : 0;
    p.nvme_reserve_bytes = p.kept_nvme_bytes() * (1 + checkpoints + (config_.speculate ? 1 : 0)) +
                           2 * p.ring_slots * p.ring_slot_bytes + p.gradients_nvme_bytes +
                           p.staging_buffers * p.staging_buffer_bytes;
  }

  /// No more than there are chunks whose gradients may pass.
  int64_t intake_slots(bool roomy) const {
    if (!roomy) return kIntakeSlotsLeast;
    int64_t passing = 0;
    for (size_t c = 0; c < layout_.chunks.size(); ++c)
      passing += gradient_bytes(c) > 0 && !on_device(c) ? 1 : 0;
    return std::clamp(passing, kIntakeSlotsLeast, kIntakeSlotsBest);
  }

  /// What is summed on the device goes to the host whole.
  void size_up_accumulators() {
    plan_.accumulators_device_bytes = 0;
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      if (summed_there(u)) plan_.accumulators_device_bytes += accumulator_bytes(layout_.units[u]);
    }
  }
  bool summed_there(size_t unit) const {
    if (!plan_.summed_on_device[unit]) return false;
    const Unit& u = layout_.units[unit];
    const auto first = plan_.gradients_on_nvme.begin() + u.first_chunk;
    return std::none_of(first, first + u.chunk_count, std::identity());
  }

  /// The longest prefix of the chunks wholly on the host that the budget takes once more.
  void hold_twice() {
    if (!config_.speculate || device_.shares_host_memory || layout_.slices > 1) return;
    int64_t left = config_.host_budget_bytes - plan_.host_bytes();
    for (size_t c = 0; c < layout_.chunks.size(); ++c) {
      const Chunk& chunk = layout_.chunks[c];
      const Unit& unit = layout_.units[chunk.unit];
      const bool at_home = !plan_.weights_on_nvme[chunk.unit] && !plan_.states_on_nvme[c] &&
                           !plan_.gradients_on_nvme[c] && !on_device(c);
      if (!unit.trainable() || !at_home) continue;
      const int64_t bytes =
          unit.component_bytes(Component::hi, chunk.elements) + unit.state_bytes(chunk.elements);
      if (bytes > left) return;
      left -= bytes;
      plan_.held_twice[c] = true;
      plan_.held_twice_bytes += bytes;
    }
  }

  void size_up_second_weights() {
    plan_.second_weights = plan_.second_weights_bytes = 0;
    if (!config_.speculate || layout_.slices > 1) return;
    for (size_t c = 0; c < layout_.chunks.size(); ++c) {
      const Chunk& chunk = layout_.chunks[c];
      if (!may_guess(plan_, static_cast<int32_t>(c)) || plan_.weights_on_nvme[chunk.unit]) continue;
      ++plan_.second_weights;
      plan_.second_weights_bytes =
          std::max(plan_.second_weights_bytes, chunk.elements * layout_.units[chunk.unit].element_bytes);
    }
    plan_.second_weights = std::min(plan_.second_weights, second_weights_most_);
  }

  /// At least the two largest units' gradients: one that arrives, one that is summed. At best as many again
  /// as are prefetched.
  void size_up_gradient_pool(bool roomy) {
    plan_.gradient_pool_bytes = 0;
    if (!plan_.gradients_pooled) return;
    std::vector<int64_t> sizes;
    for (const Unit& unit : layout_.units) {
      const int64_t width = gradient_element_bytes(unit.format, config_.gradient_accumulation);
      if (width > 0) sizes.push_back(unit.elements * width);
    }
    std::sort(sizes.rbegin(), sizes.rend());
    const size_t count =
        std::min(sizes.size(), static_cast<size_t>(2 + (roomy ? config_.prefetch_units : 0)));
    plan_.gradient_pool_bytes =
        std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(count), int64_t{0});
  }

  /// Where what carries bytes between ranks reaches the device, and its order of additions is ours; at stage
  /// 0 the sums go to all ranks, by way of the host.
  bool may_sum_on_device() const {
    return layout_.slices > 1 && layout_.world > 1 && device_.gathers && device_.updates.any() &&
           !config_.library_sums;
  }

  /// The pool, and of one chunk a part from each rank, their sum, and a piece from the host.
  int64_t sums_bytes() const {
    return aligned(plan_.gradient_pool_bytes) + (layout_.slices + 2) * part_bytes();
  }

  /// On the device, where its budget has room: what lives there has seen to that.
  void place_sums() {
    plan_.sums_device_bytes = plan_.sums_part_bytes = 0;
    if (!may_sum_on_device() || (!plan_.gradients_pooled && plan_.units_on_device() == 0)) return;
    auto gathered = gathered_sizes();
    const int64_t most = config_.device_budget_bytes;
    const int64_t others = largest(gathered, all_stay() ? gathered.size() : kLeasedMost) +
                           plan_.units_device_bytes + plan_.squares_device_bytes;
    if (most > 0 && others + sums_bytes() > most) return;
    plan_.sums_device_bytes = sums_bytes();
    plan_.sums_part_bytes = part_bytes();
    if (plan_.gradients_pooled) plan_.exchange_bytes = plan_.sums_part_bytes;
  }

  std::vector<int64_t> gathered_sizes() const {
    std::vector<int64_t> sizes;
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      const bool used_there = plan_.on_device[u] && layout_.slices == 1;
      if (!used_there && needs_gather(layout_, device_, plan_.weights_on_nvme[u]))
        sizes.push_back(gathered_bytes(layout_.units[u]));
    }
    return sizes;
  }

  /// Gathered once a step: all have room.
  bool all_stay() const { return layout_.world > 1 && !layout_.policy.divide_weights; }

  /// At least the three largest units: a layer's own, its parent's and the root's may be held at once. At
  /// best as many again as are prefetched. On a device of its own memory as much as its budget says: what
  /// stays until backward is not copied again.
  void size_up_gather(bool roomy) {
    std::vector<int64_t> gathered = gathered_sizes(), by_host;
    for (size_t u = 0; u < layout_.units.size(); ++u) {
      if (plan_.on_device[u]) continue;
      const int64_t on_host = host_block_bytes(layout_, layout_.units[u], device_, plan_.weights_on_nvme[u]);
      if (on_host > 0) by_host.push_back(on_host + kArenaAlign);
    }
    const bool kept = all_stay();
    const auto all = gathered.size();
    const auto usual = static_cast<size_t>(kLeasedMost + (roomy ? config_.prefetch_units : 0));
    plan_.gather_host_bytes = largest(by_host, kept ? all : usual);
    if (device_.shares_host_memory) return;
    const int64_t least = largest(gathered, kept ? all : kLeasedMost);
    plan_.gather_device_bytes = largest(gathered, kept ? all : usual);
    if (config_.device_budget_bytes == 0) return;
    const int64_t left = config_.device_budget_bytes - plan_.kept_device_bytes();
    if (least > left) {
      throw BudgetError(
          fmt::format("device budget too small: {} ({} bytes) are needed for the {} largest units "
                      "together and for sums of gradients, {} are allowed",
                      mib(least + plan_.kept_device_bytes()), least + plan_.kept_device_bytes(),
                      kept ? all : kLeasedMost, mib(config_.device_budget_bytes)));
    }
    plan_.gather_device_bytes = std::min(largest(gathered, all), left);
  }

  /// The sum of the `count` largest.
  static int64_t largest(std::vector<int64_t>& sizes, size_t count) {
    std::sort(sizes.rbegin(), sizes.rend());
    const auto end = sizes.begin() + static_cast<std::ptrdiff_t>(std::min(sizes.size(), count));
    return std::accumulate(sizes.begin(), end, int64_t{0});
  }

  /// Forced placements too keep to the budget: buffers shrink to their least before that is an error.
  void shrink_buffers() {
    while (!fits() && slots_ > kRingSlotsLeast) {
      --slots_;
      size_up();
    }
    if (!fits()) speculate_within_budget();
  }

  void check() const {
    if (plan_.nvme_bytes() > 0 && config_.nvme.empty()) {
      throw BudgetError("this placement needs NVMe: give a folder for it (budget.nvme, --nvme)");
    }
    if (fits()) return;
    const char* way_out = config_.nvme.empty() ? " or give a folder on NVMe (budget.nvme, --nvme)" : "";
    Config all = config_;
    all.host_budget_bytes = 0;
    Planner least(layout_, all, device_);
    least.place_on_device();
    least.second_weights_most_ = 0;
    least.slots_ = kRingSlotsLeast;
    if (!forced()) least.relieve_the_host();
    if (!config_.nvme.empty()) least.spill_all();
    least.size_up();
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
  int64_t slots_ = kRingSlotsBest;
  int64_t second_weights_most_ = std::numeric_limits<int64_t>::max();
};

/// Bytes of one element, its share of the scales included.
double exact_bytes(const optim::ComponentSpec& spec) {
  return static_cast<double>(spec.bytes(optim::kScaleBlock)) / optim::kScaleBlock;
}

Plan::Holding frozen_holding(const Unit& unit) {
  return {"frozen", fmt::format("hi {}", unit.element_bytes), 0, static_cast<double>(unit.element_bytes)};
}

/// Of the numbers that the bytes stand for. Units differ by what rounds their last blocks up: to three digits
/// they are alike.
Plan::Holding packed_holding(const Unit& unit) {
  double bytes = 0;
  double parameters = 0;
  for (const Segment& segment : unit.segments) {
    bytes += static_cast<double>(segment.elements * unit.element_bytes);
    parameters += static_cast<double>(segment.parameters);
  }
  const double each = bytes / parameters;
  return {fmt::format("frozen, {}", unit.packing), fmt::format("{:.3g}", each), 0, each};
}

std::vector<Plan::Holding> holdings_of(const Layout& layout) {
  std::vector<Plan::Holding> holdings;
  for (const Unit& unit : layout.units) {
    Plan::Holding own = unit.packing.empty() ? frozen_holding(unit) : packed_holding(unit);
    if (unit.trainable()) {
      own = {fmt::format("{}, {}", optim::name(unit.optimizer), format_name(unit.format)), "", 0, 0};
      for (const optim::ComponentSpec& spec : unit.components()) {
        own.components +=
            fmt::format("{}{} {:.4g}", own.components.empty() ? "" : ", ", spec.name, exact_bytes(spec));
        own.parameter_bytes += exact_bytes(spec);
      }
    }
    const auto same = [&](const Plan::Holding& h) {
      return h.name == own.name && h.components == own.components;
    };
    auto at = std::find_if(holdings.begin(), holdings.end(), same);
    if (at == holdings.end()) at = holdings.insert(at, own);
    for (const Segment& segment : unit.segments) at->parameters += segment.parameters;
  }
  return holdings;
}

}  // namespace

DeviceTraits traits_of(kernels::Device& device, const Communicator& ranks) {
  const bool own_memory = !device.shares_host_memory();
  const kernels::DeviceKernels* kernels = device.kernels();
  return {!own_memory, kernels != nullptr ? kernels->formats() : kernels::Formats(),
          own_memory && ranks.device() == &device};
}

bool needs_gather(const Layout& layout, const DeviceTraits& device, bool weights_on_nvme) {
  if (held_whole(layout, device, weights_on_nvme)) return false;
  return weights_on_nvme || layout.world > 1 || !device.shares_host_memory;
}

bool meets_on_host(const Layout& layout, const DeviceTraits& device) {
  return device.shares_host_memory || (layout.world > 1 && !device.gathers);
}

int64_t host_block_bytes(const Layout& layout, const Unit& unit, const DeviceTraits& device,
                         bool weights_on_nvme) {
  if (!needs_gather(layout, device, weights_on_nvme)) return 0;
  if (meets_on_host(layout, device)) return unit.bytes();
  return weights_on_nvme ? unit.shard_bytes() : 0;
}

bool held_whole(const Layout& layout, const DeviceTraits& device, bool weights_on_nvme) {
  return layout.world > 1 && !layout.policy.divide_weights && device.shares_host_memory && !weights_on_nvme;
}

optim::Element gradient_element(optim::Format format, int64_t gradient_accumulation) {
  if (format == optim::Format::fp32 || gradient_accumulation > 1) return optim::Element::fp32;
  return format == optim::Format::fp16 ? optim::Element::fp16 : optim::Element::bf16;
}

int64_t gradient_element_bytes(UnitFormat format, int64_t gradient_accumulation) {
  return format ? optim::bytes(gradient_element(*format, gradient_accumulation)) : 0;
}

int64_t accumulator_bytes(const Unit& unit, int64_t gradient_accumulation) {
  if (gradient_accumulation == 1 || !unit.trainable()) return 0;
  return aligned(unit.elements * gradient_element_bytes(unit.format, gradient_accumulation));
}

bool may_live_on_device(const Unit& unit, const DeviceTraits& device) {
  return unit.trainable() && device.updates[static_cast<size_t>(*unit.format)];
}

bool may_guess(const Plan& plan, int32_t chunk) {
  return plan.held_twice[chunk] || (plan.states_on_nvme[chunk] && !plan.gradients_on_nvme[chunk]);
}

Plan make_plan(const Layout& layout, const Config& config, const DeviceTraits& device) {
  Plan plan = Planner(layout, config, device).make();
  plan.holdings = holdings_of(layout);
  plan.homes = homes_of(layout, plan, device);
  return plan;
}

std::string Plan::text() const {
  std::string out;
  const auto row = [&](std::string_view what, int64_t host, int64_t nvme) {
    out +=
        fmt::format("  {:<34} {:>14} {:>14}\n", what, host > 0 ? mib(host) : "-", nvme > 0 ? mib(nvme) : "-");
  };
  out += fmt::format("  {:<34} {:>14} {:>14}\n", "component", "host", "nvme");
  row("weights (hi)", weights_host_bytes, weights_nvme_bytes);
  row("states", states_host_bytes, states_nvme_bytes);
  row("gradients in flight", gradients_host_bytes, gradients_nvme_bytes);
  row(fmt::format("ring ({} slots of {})", ring_slots, mib(ring_slot_bytes)), ring_slots * ring_slot_bytes,
      0);
  if (staging_buffers > 0) {
    row(fmt::format("staging of gradients ({} of {})", staging_buffers, mib(staging_buffer_bytes)),
        staging_buffers * staging_buffer_bytes, 0);
  }
  row("gather arena", gather_host_bytes, 0);
  if (intake_slots > 0) row("gradients from the device", intake_slots * intake_slot_bytes, 0);
  if (second_weights > 0) row("second weights of guessed updates", second_weights * second_weights_bytes, 0);
  if (held_twice_bytes > 0) row("second versions of guessed updates", held_twice_bytes, 0);
  if (pool_host_bytes() > 0) row("gradients until they are summed", pool_host_bytes(), 0);
  row("scratch", access_bytes + exchange_bytes + serve_bytes + squares_device_bytes, 0);
  row("sum", host_bytes(), nvme_bytes());
  out += fmt::format("  {:<34} {:>14}\n", "budget", mib(host_budget_bytes));
  for (const Holding& holding : holdings) {
    out += fmt::format("  {}: {} parameters of {:.4g} bytes ({})\n", holding.name, holding.parameters,
                       holding.parameter_bytes, holding.components);
  }
  if (gather_device_bytes > 0)
    out += fmt::format("  {:<34} {:>14}\n", "gather arena on the device", mib(gather_device_bytes));
  if (sums_device_bytes > 0)
    out += fmt::format("  {:<34} {:>14}\n", "gradients and their sums there", mib(sums_device_bytes));
  if (accumulators_device_bytes > 0)
    out += fmt::format("  {:<34} {:>14}\n", "sums of micro-batches there", mib(accumulators_device_bytes));
  if (units_device_bytes > 0) {
    out += fmt::format("  {:<34} {:>14}\n",
                       fmt::format("{} of {} units live there", units_on_device(), on_device.size()),
                       mib(units_device_bytes));
  }
  if (nvme_bytes() > 0) {
    out += fmt::format(
        "  NVMe: {} reserved ({} for checkpoints, one being taken, and what is on its way); a step reads {} "
        "and writes {}\n",
        mib(nvme_reserve_bytes), mib(nvme_reserve_bytes - nvme_bytes()), mib(nvme_read_bytes_per_step),
        mib(nvme_written_bytes_per_step));
  }
  return out;
}

}  // namespace overspill::engine
