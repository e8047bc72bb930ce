#include "engine/plan/plan_sizes.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <span>

#include "engine/memory/budget.h"

namespace overspill::engine {
namespace {

// Pieces of gradients being copied from the device, or added: some of each, and enough to keep the link and
// all workers busy where the budget has room.
constexpr int64_t kIntakeSlotsLeast = 4;
constexpr int64_t kIntakeSlotsBest = 16;
constexpr int64_t kArenaAlign = 4096;
constexpr int64_t kMiB = 1 << 20;

int64_t aligned(int64_t bytes) {
  return (bytes + kArenaAlign - 1) / kArenaAlign * kArenaAlign;
}

}  // namespace

std::string mib(int64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / kMiB);
}

int64_t states_bytes(const Layout& layout, size_t chunk) {
  const Chunk& c = layout.chunks[chunk];
  return layout.units[c.unit].state_bytes(c.elements);
}

int64_t accumulator_bytes(const Unit& unit, int64_t gradient_accumulation) {
  if (gradient_accumulation == 1 || !unit.trainable()) return 0;
  return aligned(unit.elements * gradient_element_bytes(unit.format, gradient_accumulation));
}

int64_t PlanSizes::part_bytes() const {
  int64_t most = 0;
  for (const Chunk& chunk : layout_.chunks) {
    const int64_t width = std::max<int64_t>(4, layout_.units[chunk.unit].element_bytes);
    most = std::max(most, chunk.elements * width);
  }
  return most;
}

int64_t PlanSizes::gradient_bytes(size_t c) const {
  const Chunk& chunk = layout_.chunks[c];
  return chunk.elements *
         gradient_element_bytes(layout_.units[chunk.unit].format, config_.gradient_accumulation);
}

bool PlanSizes::on_device(size_t chunk) const {
  return plan_.on_device[layout_.chunks[chunk].unit];
}

int64_t PlanSizes::slot_bytes(size_t c) const {
  const Chunk& chunk = layout_.chunks[c];
  const Unit& unit = layout_.units[chunk.unit];
  if (!unit.trainable() || plan_.on_device[chunk.unit]) return 0;
  const bool weights = plan_.weights_on_nvme[chunk.unit];
  return (weights ? unit.component_bytes(Component::hi, chunk.elements) : 0) +
         (plan_.states_on_nvme[c] ? unit.state_bytes(chunk.elements) : 0) +
         (plan_.gradients_on_nvme[c] ? gradient_bytes(c) : 0);
}

int64_t PlanSizes::gathered_bytes(const Unit& unit) {
  return unit.bytes() + kArenaAlign;
}

std::vector<GatheredSize> PlanSizes::gathered_sizes() const {
  std::vector<GatheredSize> sizes;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const Unit& unit = layout_.units[u];
    if (unit.part_bytes == 0 && !used_in_place(layout_, plan_, device_, static_cast<int32_t>(u)))
      sizes.push_back({gathered_bytes(unit), unit.together});
  }
  return sizes;
}

namespace {

constexpr size_t kLeasedMost = 3;  // of units that are held one by one

/// The sum of the `count` largest, without those that a block of the number `without` holds.
int64_t largest(std::span<const GatheredSize> sorted, size_t count, int32_t without = -1) {
  int64_t sum = 0;
  for (const GatheredSize& unit : sorted) {
    if (count == 0) break;
    if (without >= 0 && (unit.together == without || unit.together == kWithEachBlock)) continue;
    sum += unit.bytes;
    --count;
  }
  return sum;
}

int64_t sum_of(std::span<const GatheredSize> sizes) {
  return largest(sizes, sizes.size());
}

}  // namespace

int64_t held_at_once(std::vector<GatheredSize> sizes, size_t more) {
  std::sort(sizes.begin(), sizes.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  std::map<int32_t, int64_t> together;
  int64_t with_each = 0;
  for (const GatheredSize& unit : sizes) {
    if (unit.together >= 0) together[unit.together] += unit.bytes;
    if (unit.together == kWithEachBlock) with_each += unit.bytes;
  }
  const int64_t one_by_one = largest(sizes, kLeasedMost + more);
  if (together.empty()) return one_by_one;
  const auto most = std::max_element(together.begin(), together.end(),
                                     [](const auto& a, const auto& b) { return a.second < b.second; });
  return std::max(one_by_one, most->second + with_each + largest(sizes, kLeasedMost - 1 + more, most->first));
}

int64_t PlanSizes::accumulator_bytes(const Unit& unit) const {
  return layout_.slices > 1 ? 0 : engine::accumulator_bytes(unit, config_.gradient_accumulation);
}

bool PlanSizes::summed_there(size_t unit) const {
  if (!plan_.summed_on_device[unit]) return false;
  const Unit& u = layout_.units[unit];
  const auto first = plan_.gradients_on_nvme.begin() + u.first_chunk;
  return std::none_of(first, first + u.chunk_count, std::identity());
}

int64_t PlanSizes::living_bytes(const Unit& unit) const {
  const int64_t elements = plan_.gradients_pooled ? unit.shard_elements : unit.elements;
  int64_t bytes = elements * gradient_element_bytes(unit.format, config_.gradient_accumulation);
  for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
    bytes += unit.component_bytes(Component::hi, layout_.chunks[c].elements) +
             states_bytes(layout_, static_cast<size_t>(c));
  }
  return bytes;
}

int64_t PlanSizes::device_scratch_bytes() const {
  if (layout_.slices > 1) return 0;
  int64_t most = 0;
  for (const Chunk& chunk : layout_.chunks) most = std::max(most, chunk.elements);
  return most * 4;
}

int64_t PlanSizes::squares_bytes(const Unit& unit) const {
  if (!unit.trainable()) return 0;
  int64_t blocks = 0;
  for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
    for (const Run& run : layout_.chunks[c].runs) blocks += kernels::squares_blocks(run.elements);
  }
  const int64_t bytes = blocks * static_cast<int64_t>(sizeof(kernels::Squares));
  return aligned(bytes);
}

/// Gathered once a step: all have room.
bool PlanSizes::all_stay() const {
  return layout_.shards > 1 && !layout_.policy.divide_weights;
}

bool PlanSizes::may_sum_on_device() const {
  return layout_.slices > 1 && layout_.shards > 1 && device_.gathers && device_.updates.any() &&
         !config_.library_sums;
}

int64_t PlanSizes::sums_bytes() const {
  return aligned(plan_.gradient_pool_bytes) + (layout_.slices + 2) * part_bytes();
}

void PlanSizes::size_up() {
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
      p.gradients_host_bytes += gradient_bytes(c) * (p.gradients_pooled ? 1 : layout_.shards);
    }
  }
  p.nvme_read_bytes_per_step += p.states_nvme_bytes + gradients_moved;
  p.nvme_written_bytes_per_step += p.states_nvme_bytes + gradients_moved;
  p.ring_slots = p.ring_slot_bytes > 0 ? slots : 0;
  p.staging_buffers = std::min({slots, kRingSlotsBest, spilled_gradients});
  size_up_second_weights();
  p.access_bytes = component_most;
  p.intake_slot_bytes = component_most;
  p.intake_slots = device_.shares_host_memory ? 0 : intake_slots(slots > kRingSlotsLeast);
  size_up_accumulators();
  p.exchange_bytes = layout_.slices > 1 ? (layout_.slices + 2) * component_most : 0;
  size_up_gradient_pool(slots > kRingSlotsLeast);
  p.serve_bytes = 0;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    if (layout_.shards > 1 && p.weights_on_nvme[u])
      p.serve_bytes = std::max(p.serve_bytes, layout_.units[u].shard_bytes());
  }
  place_sums();
  size_up_gather(slots > kRingSlotsLeast);
  size_up_parts();
  const int64_t checkpoints = config_.train_after_save ? config_.checkpoints_kept + 1 : 0;
  p.nvme_reserve_bytes = p.kept_nvme_bytes() * (1 + checkpoints + (config_.speculate ? 1 : 0)) +
                         2 * p.ring_slots * p.ring_slot_bytes + p.gradients_nvme_bytes +
                         p.staging_buffers * p.staging_buffer_bytes + p.activations_host_bytes;
}

/// No more than there are chunks whose gradients may pass.
int64_t PlanSizes::intake_slots(bool roomy) const {
  if (!roomy) return kIntakeSlotsLeast;
  int64_t passing = 0;
  for (size_t c = 0; c < layout_.chunks.size(); ++c)
    passing += gradient_bytes(c) > 0 && !on_device(c) ? 1 : 0;
  return std::clamp(passing, kIntakeSlotsLeast, kIntakeSlotsBest);
}

/// What is summed on the device goes to the host whole.
void PlanSizes::size_up_accumulators() {
  plan_.accumulators_device_bytes = 0;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    if (summed_there(u)) plan_.accumulators_device_bytes += accumulator_bytes(layout_.units[u]);
  }
}

void PlanSizes::size_up_second_weights() {
  plan_.second_weights = plan_.second_weights_bytes = 0;
  if (!config_.speculate || layout_.slices > 1) return;
  for (size_t c = 0; c < layout_.chunks.size(); ++c) {
    const Chunk& chunk = layout_.chunks[c];
    if (!may_guess(plan_, static_cast<int32_t>(c)) || plan_.weights_on_nvme[chunk.unit]) continue;
    ++plan_.second_weights;
    plan_.second_weights_bytes =
        std::max(plan_.second_weights_bytes, chunk.elements * layout_.units[chunk.unit].element_bytes);
  }
  plan_.second_weights = std::min(plan_.second_weights, second_weights_most);
}

void PlanSizes::size_up_gradient_pool(bool roomy) {
  plan_.gradient_pool_bytes = 0;
  if (!plan_.gradients_pooled) return;
  std::vector<int64_t> sizes;
  for (const Unit& unit : layout_.units) {
    const int64_t width = gradient_element_bytes(unit.format, config_.gradient_accumulation);
    if (width > 0) sizes.push_back(unit.elements * width);
  }
  std::sort(sizes.rbegin(), sizes.rend());
  const size_t count = std::min(sizes.size(), static_cast<size_t>(2 + (roomy ? config_.prefetch_units : 0)));
  plan_.gradient_pool_bytes =
      std::accumulate(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(count), int64_t{0});
}

/// On the device, where its budget has room: what lives there has seen to that.
void PlanSizes::place_sums() {
  plan_.sums_device_bytes = plan_.sums_part_bytes = 0;
  if (!may_sum_on_device() || (!plan_.gradients_pooled && plan_.units_on_device() == 0)) return;
  const auto gathered = gathered_sizes();
  const int64_t most = config_.device_budget_bytes;
  const int64_t others = (all_stay() ? sum_of(gathered) : held_at_once(gathered, 0)) +
                         plan_.units_device_bytes + plan_.squares_device_bytes;
  if (most > 0 && others + sums_bytes() > most) return;
  plan_.sums_device_bytes = sums_bytes();
  plan_.sums_part_bytes = part_bytes();
  if (plan_.gradients_pooled) plan_.exchange_bytes = plan_.sums_part_bytes;
}

/// At least what is held at once, at best as many units again as are prefetched. On a device of its own
/// memory as much as its budget says: what stays until backward is not copied again.
void PlanSizes::size_up_gather(bool roomy) {
  const std::vector<GatheredSize> gathered = gathered_sizes();
  std::vector<GatheredSize> by_host;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    if (plan_.on_device[u] || layout_.units[u].part_bytes > 0) continue;
    const int64_t on_host = host_block_bytes(layout_, layout_.units[u], device_, plan_.weights_on_nvme[u]);
    if (on_host > 0) by_host.push_back({on_host + kArenaAlign, layout_.units[u].together});
  }
  const bool kept = all_stay();
  const auto ahead = std::max(static_cast<size_t>(roomy ? config_.prefetch_units : 0), spare_units);
  plan_.gather_host_bytes = kept ? sum_of(by_host) : held_at_once(by_host, ahead);
  if (device_.shares_host_memory) return;
  const int64_t least = kept ? sum_of(gathered) : held_at_once(gathered, 0);
  plan_.gather_device_bytes = kept ? sum_of(gathered) : held_at_once(gathered, ahead);
  if (config_.device_budget_bytes == 0) return;
  const int64_t left = config_.device_budget_bytes - plan_.kept_device_bytes();
  if (least > left) {
    throw BudgetError(fmt::format(
        "device budget too small: {} ({} bytes) are needed for {} and for sums of gradients, and {} are "
        "allowed: "
        "raise budget.device",
        mib(least + plan_.kept_device_bytes()), least + plan_.kept_device_bytes(),
        kept ? "all units" : "the units that are in use at the same time", mib(config_.device_budget_bytes)));
  }
  plan_.gather_device_bytes = std::min(sum_of(gathered), left);
}

/// While the caller computes with one part, the next one is read. A part may begin inside a chunk.
void PlanSizes::size_up_parts() {
  plan_.part_chunks = plan_.part_chunk_bytes = 0;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const Unit& unit = layout_.units[u];
    if (unit.part_bytes == 0 || !plan_.weights_on_nvme[u]) continue;
    const int64_t bytes = aligned(layout_.chunks[unit.first_chunk].elements * unit.element_bytes);
    plan_.part_chunk_bytes = std::max(plan_.part_chunk_bytes, bytes);
    plan_.part_chunks =
        std::max(plan_.part_chunks, std::min<int64_t>(unit.chunk_count, unit.part_bytes / bytes + 2));
  }
}

}  // namespace overspill::engine
