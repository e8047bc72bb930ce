// Sums gradients over ranks: keeps this rank's gradients of each unit until all ranks sum it (docs/ranks.md).
// A sum is an all-to-all of slices, then an fp32 addition in rank order: the same bits on every transport and
// at every stage. A rank without a gradient of the unit sends nothing and counts as zeros. With
// Config::library_sums the transport's own reduce-scatter makes the sum instead. Where possible the device
// does all of this (device_sums.h), with the same bits.
//
// At stages 2 and 3 a pool holds a unit's whole gradients only until every rank has given all its own; then
// they are summed, and only the shard's part is kept. With several micro-batches, unless they pass each unit
// together, that would be at the end of the step. In that case, and at stages 0 and 1, the unit's own memory
// holds them whole, and step() sums them. The sum of a unit that lives on the device stays there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/collectives/rank_groups.h"
#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/device/device_sums.h"
#include "engine/device/device_units.h"
#include "engine/memory/range_allocator.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

class GradientSums {
 public:
  GradientSums(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, RankGroups& ranks,
               DeviceUnits& device_units);

  /// Provides memory, in UnitState::gradients, for the unit's gradients until they are summed. Waits for
  /// room, and for a sum that is due. Throws BudgetError where there will never be room,
  /// std::invalid_argument for a gradient after the sum where there is no memory for it.
  void open(int32_t unit) MAY_RELEASE(engine_mutex);
  /// Whether that memory holds gradients of the segment.
  bool holds(int32_t unit, int32_t segment) const REQUIRES(engine_mutex) {
    return of_[unit].held[segment] != 0;
  }
  void arrived(int32_t unit, int32_t segment) REQUIRES(engine_mutex);

  /// Whether the memory for the unit's gradients is on the device; then on_device() takes them in.
  bool are_on_device(int32_t unit) const {
    return device_.used() && (setup_.plan.gradients_pooled || setup_.lives_on_device(unit));
  }
  DeviceSums& on_device() { return device_; }

  bool gives(int32_t unit) const REQUIRES(engine_mutex) { return of_[unit].gives; }
  /// Whether the chunks hold this step's sum of the gradients given so far.
  bool has_sum(int32_t unit) const REQUIRES(engine_mutex) { return of_[unit].summed; }
  /// What sums over the ranks are multiplied by.
  float factor() const;
  /// Whether, going by earlier steps, this rank will give no more gradients of the unit before step().
  bool complete(int32_t unit) const REQUIRES(engine_mutex) { return of_[unit].complete; }

  /// The unit's gradients were summed, here and everywhere.
  void summed(int32_t unit) REQUIRES(engine_mutex);
  /// step() has taken the sums: the next gradient is the first of its step.
  void restart() REQUIRES(engine_mutex);

  /// Whether a caller waits in open() that nothing now under way will wake.
  bool stuck() const REQUIRES(engine_mutex);
  void refuse() REQUIRES(engine_mutex) { refused_ = true; }

  /// Sums the unit. For the thread of the rounds, on all ranks alike, while no other thread uses the unit.
  /// `gives`, by rank: whether the rank has gradients of it.
  void sum(int32_t unit, std::span<const uint8_t> gives) EXCLUDES(engine_mutex);

 private:
  struct Given {
    std::vector<uint8_t> held;      // by segment: something lies in the unit's memory
    std::vector<int32_t> arrivals;  // in this step
    std::vector<int32_t> expected;  // in a step, as far as is known
    int64_t offset = -1;            // in the pool
    bool gives = false;
    bool complete = false;
    bool summed = false;  // in this step: a further sum is added to it
  };
  bool lacks(int32_t unit, int32_t segment) EXCLUDES(engine_mutex);
  bool is_first_sum(int32_t unit) EXCLUDES(engine_mutex);
  void sum_chunk(int32_t chunk, std::span<const uint8_t> gives) EXCLUDES(engine_mutex);
  void square_there(int32_t unit) EXCLUDES(engine_mutex);
  void add_on_device(int32_t unit, int64_t in_slice, int64_t elements, std::span<const uint8_t> gives);
  void add_in_rank_order(int32_t unit, int64_t in_slice, std::span<float> sum,
                         std::span<const uint8_t> gives);
  void choose_slices(int32_t unit, int64_t in_slice, int64_t elements, std::span<std::byte> room,
                     std::span<const uint8_t> gives);
  void add_by_the_transport(int32_t unit, int64_t in_slice, std::span<float> sum, bool gives);
  std::byte* pool() const { return device_.used() ? device_.pool() : pool_memory_.data(); }
  const std::byte* slice_of(int32_t unit, int rank, int64_t in_slice) const;
  void check_refused(int32_t unit) REQUIRES(engine_mutex);
  void zero_absent(int32_t unit) EXCLUDES(engine_mutex);
  bool must_wait(int32_t unit) const REQUIRES(engine_mutex);
  /// A wait calls it repeatedly, so it changes nothing.
  bool may_open(int32_t unit) const REQUIRES(engine_mutex);
  void take_memory(int32_t unit) REQUIRES(engine_mutex);
  void free_memory(int32_t unit) REQUIRES(engine_mutex);

  const Setup& setup_;
  Core& core_;
  Hardware& hardware_;
  ModelStates& model_;
  RankGroups& ranks_;
  DeviceUnits& device_units_;
  DeviceSums device_;
  LinkedMemory pool_memory_;
  RangeAllocator pool_ GUARDED_BY(engine_mutex);
  LinkedMemory exchange_;  // slices of one chunk from all ranks, and their sum; or that alone
  std::vector<Given> of_ GUARDED_BY(engine_mutex);
  std::vector<std::span<const std::byte>> send_;
  std::vector<std::span<std::byte>> receive_;
  int32_t waits_for_ GUARDED_BY(engine_mutex) = -1;  // a caller in open(): the unit
  bool refused_ GUARDED_BY(engine_mutex) = false;
};

}  // namespace overspill::engine
