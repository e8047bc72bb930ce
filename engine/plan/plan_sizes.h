// The bytes of every buffer and tier that a plan needs, given where it places weights, states and gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "engine/base/config.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"

namespace overspill::engine {

// Slots of the ring; where gradients are spilled, as many buffers for them, up to the best.
inline constexpr int64_t kRingSlotsLeast = 2;  // one being updated (filled), one in flight
inline constexpr int64_t kRingSlotsBest = 8;   // reads, an update a thread, and writes, all at once

std::string mib(int64_t bytes);

/// Bytes of all components but hi of one chunk of this rank.
int64_t states_bytes(const Layout& layout, size_t chunk);

/// Bytes of a unit where weights are gathered, and the number of those that it is held together with.
struct GatheredSize {
  int64_t bytes = 0;
  int32_t together = -1;
};

/// The most that is held at once: the three largest units, since a layer's own, its parent's and the root's
/// may be; or the units of one number and of kWithEachBlock, with the two largest others. And the `more`
/// largest of the rest, which are read ahead.
int64_t held_at_once(std::vector<GatheredSize> sizes, size_t more);

/// Sizes the plan that it is given, again after each change of a placement. Refers to all it is given.
class PlanSizes {
 public:
  PlanSizes(const Layout& layout, const Config& config, const DeviceTraits& device, Plan& plan)
      : layout_(layout), config_(config), device_(device), plan_(plan) {}
  PlanSizes(const PlanSizes&) = delete;
  PlanSizes& operator=(const PlanSizes&) = delete;

  int64_t slots = kRingSlotsBest;  // of the ring, where anything needs one
  size_t spare_units = 0;          // room for so many more units than are held at once
  int64_t second_weights_most =
      std::numeric_limits<int64_t>::max();  // chunks whose guessed weights have room

  /// Fills in all byte counts of the plan, from its placements. Throws BudgetError where the device's budget
  /// is less than the least it needs.
  void size_up();
  /// One component, or a sum, of the largest chunk.
  int64_t part_bytes() const;
  /// Of this rank's chunk; on the host all ranks' are held until they are reduced.
  int64_t gradient_bytes(size_t c) const;
  bool on_device(size_t chunk) const;
  static int64_t gathered_bytes(const Unit& unit);
  /// Of each unit that is gathered.
  std::vector<GatheredSize> gathered_sizes() const;
  int64_t accumulator_bytes(const Unit& unit) const;
  /// Whether the device adds up the unit's gradients over micro-batches; the whole sum then goes to the host.
  bool summed_there(size_t unit) const;
  /// Device bytes of a unit that lives there: this rank's components, and its gradient in flight.
  int64_t living_bytes(const Unit& unit) const;
  /// Device bytes through which one chunk's gradient comes from the host. Sums over ranks have scratch of
  /// their own.
  int64_t device_scratch_bytes() const;
  /// Bytes of the sums of squares of a unit's gradients: one sum per block of each run.
  int64_t squares_bytes(const Unit& unit) const;
  /// Whether the device may sum gradients over ranks: the transport reaches it and leaves the order of
  /// additions to us. Not at stage 0, where the sums go to all ranks by way of the host.
  bool may_sum_on_device() const;
  /// Device bytes of sums over ranks: the pool, and for one chunk a part from each rank, their sum, and a
  /// piece from the host.
  int64_t sums_bytes() const;
  /// The pool holds at least the two largest units' gradients: one that arrives, one that is summed. With
  /// `roomy` it also holds as many more as units are prefetched.
  void size_up_gradient_pool(bool roomy);

 private:
  int64_t slot_bytes(size_t c) const;
  bool all_stay() const;
  int64_t intake_slots(bool roomy) const;
  void size_up_accumulators();
  void size_up_second_weights();
  void place_sums();
  void size_up_gather(bool roomy);
  void size_up_parts();

  const Layout& layout_;
  const Config& config_;
  const DeviceTraits& device_;
  Plan& plan_;
};

}  // namespace overspill::engine
