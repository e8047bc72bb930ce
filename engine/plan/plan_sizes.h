// What memory a plan takes, given where it places weights, states and gradients: bytes of every buffer and
// tier.
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
inline constexpr size_t kLeasedMost = 3;       // units that are held at once

std::string mib(int64_t bytes);

/// Of a chunk of this rank: all its components but hi.
int64_t states_bytes(const Layout& layout, size_t chunk);

/// Sizes the plan that it is given, again after each change of a placement. Refers to all it is given.
class PlanSizes {
 public:
  PlanSizes(const Layout& layout, const Config& config, const DeviceTraits& device, Plan& plan)
      : layout_(layout), config_(config), device_(device), plan_(plan) {}
  PlanSizes(const PlanSizes&) = delete;
  PlanSizes& operator=(const PlanSizes&) = delete;

  int64_t slots = kRingSlotsBest;  // of the ring, where anything needs one
  int64_t second_weights_most =
      std::numeric_limits<int64_t>::max();  // chunks whose guessed weights have room

  /// Fills in all byte counts of the plan, from where it places what. Throws BudgetError where the device's
  /// budget does not take what has to be there.
  void size_up();
  /// One component, or a sum, of the largest chunk.
  int64_t part_bytes() const;
  /// Of this rank's chunk; on the host all ranks' are held until they are reduced.
  int64_t gradient_bytes(size_t c) const;
  bool on_device(size_t chunk) const;
  static int64_t gathered_bytes(const Unit& unit);
  /// Of each unit that is gathered.
  std::vector<int64_t> gathered_sizes() const;
  /// The sum of the `count` largest; sorts them.
  static int64_t largest(std::vector<int64_t>& sizes, size_t count);
  int64_t accumulator_bytes(const Unit& unit) const;
  /// Whether micro-batches of the unit are added up on the device: what is summed there goes to the host
  /// whole.
  bool summed_there(size_t unit) const;
  /// Of one that lives on the device: this rank's components, and its gradient in flight.
  int64_t living_bytes(const Unit& unit) const;
  /// For a piece of a gradient from the host: of one chunk. Sums of several ranks have their own.
  int64_t device_scratch_bytes() const;
  /// Of the sums of squares of a unit's gradients, block by block of each run.
  int64_t squares_bytes(const Unit& unit) const;
  /// Where what carries bytes between ranks reaches the device, and its order of additions is ours; at stage
  /// 0 the sums go to all ranks, by way of the host.
  bool may_sum_on_device() const;
  /// Of sums on the device: the pool, and of one chunk a part from each rank, their sum, and a piece from the
  /// host.
  int64_t sums_bytes() const;
  /// At least the two largest units' gradients: one that arrives, one that is summed. At best as many again
  /// as are prefetched.
  void size_up_gradient_pool(bool roomy);

 private:
  int64_t slot_bytes(size_t c) const;
  bool all_stay() const;
  int64_t intake_slots(bool roomy) const;
  void size_up_accumulators();
  void size_up_second_weights();
  void place_sums();
  void size_up_gather(bool roomy);

  const Layout& layout_;
  const Config& config_;
  const DeviceTraits& device_;
  Plan& plan_;
};

}  // namespace overspill::engine
