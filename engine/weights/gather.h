// Gathered units: buffers for weights that cannot be used at their home. They are filled ahead in traced
// order and kept while there is room; the unit whose next use is farthest away goes first (Belady 1966, "A
// study of replacement algorithms for a virtual-storage computer").
//
// Some methods give the engine's mutex up while they wait for a device or copy weights. So only one thread at
// a time may change weights (invalidate()), and no thread may acquire meanwhile.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/core/block.h"
#include "engine/core/core.h"
#include "engine/core/demand.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/memory/range_allocator.h"
#include "engine/plan/setup.h"
#include "engine/weights/part_reader.h"
#include "engine/weights/trace.h"

namespace overspill::engine {

/// The owner of slots that hold weights: the ring (states/ring.h).
class SlotOwner {
 public:
  /// Code is about to copy a chunk's weights from its slot, without the mutex: the slot keeps them until
  /// returned().
  virtual void lend(int32_t chunk) REQUIRES(engine_mutex) = 0;
  virtual void returned(int32_t chunk) REQUIRES(engine_mutex) = 0;

 protected:
  ~SlotOwner() = default;
};

class Gatherer {
 public:
  Gatherer(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, Demand& demand);
  /// Sets the slot owner, before anything is gathered. It outlives all calls.
  void copies_from_slots_of(SlotOwner& owner) { slots_ = &owner; }
  ~Gatherer();  // no lease is left; waits for copies and uses
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  /// Leases the unit's gathered weights: waits until they are read, updated, collected and on their way to
  /// the device. Throws BudgetError when leased units leave no room, kernels::DeviceError.
  Block* acquire(int32_t unit) MAY_RELEASE(engine_mutex);
  /// Returns when the weights of a leased block are on the device. Throws kernels::DeviceError; the lease
  /// goes on.
  void wait_for_copy(Block& block) EXCLUDES(engine_mutex);
  /// Called before a queue is given work that reads the block's weights: the caller makes it wait for the
  /// returned event.
  kernels::Event use(Block* block, kernels::Stream& queue) REQUIRES(engine_mutex);
  /// Ends a lease; the memory stays in use until the events `uses` are reached. A failure fails the engine.
  void release(Block* block, std::span<const kernels::Event> uses) noexcept REQUIRES(engine_mutex);

  /// The order in which units are acquired: the code that acquires records it, prefetch() reads it.
  Trace& trace() REQUIRES(engine_mutex) { return trace_; }

  /// Starts to fill the units that come next, as far as there is room that is not needed sooner.
  void prefetch() MAY_RELEASE(engine_mutex);

  /// Copies a chunk's new weights to the unit's block, if that waits for them. Called by the worker that made
  /// them, which has exclusive use of them.
  void deliver(int32_t chunk, const std::byte* weights) MAY_RELEASE(engine_mutex);

  /// Whether a chunk's newest weights can be had without a read from the store: they are in memory, or were
  /// never written, which means zeros.
  bool in_memory(int32_t chunk) const REQUIRES(engine_mutex) {
    return weights_in_memory(chunk) != nullptr || model_.chunks[chunk].extents[0].empty();
  }
  /// Copies these weights, from byte `begin` of the chunk on. False: only the store has them.
  bool copy_from_memory(int32_t chunk, int64_t begin, std::span<std::byte> to) MAY_RELEASE(engine_mutex);

  /// Weights that are read in parts.
  PartReader& parts() { return parts_; }

  /// Gives up the gathered blocks of units whose weights are about to change. Waits for reads in flight.
  void invalidate(std::span<const int32_t> units) MAY_RELEASE(engine_mutex);

  // ---- several ranks: for the rounds (engine/ranks/rounds.h)

  /// For a unit that every rank holds whole (stages 1 and 2): waits until it is gathered.
  void acquire_whole(int32_t unit) MAY_RELEASE(engine_mutex);
  /// Marks such units to be gathered as soon as they are up to date.
  void want_whole(std::span<const int32_t> units) REQUIRES(engine_mutex);

  /// Whether there is room for the unit with this rank's shard in it; on a device, room that no work uses.
  bool wants(int32_t unit) const REQUIRES(engine_mutex);
  /// This rank's shard, up to date, in host memory, or in device memory if it lives there; null: it is not in
  /// memory.
  const std::byte* shard_in_memory(int32_t unit) const REQUIRES(engine_mutex);
  /// The same; the memory stays until unpin_all_but().
  const std::byte* pin_shard(int32_t unit) REQUIRES(engine_mutex);
  void unpin_all_but(std::span<const int32_t> units) REQUIRES(engine_mutex);
  /// Brings the shard into memory, for others who want it.
  void prepare_to_serve(int32_t unit) MAY_RELEASE(engine_mutex);
  /// Copies what was read for others to the block of a unit that is used here too.
  void copy_served() MAY_RELEASE(engine_mutex);
  /// Memory for all ranks' shards, with this rank's in its place; on the device where the shards meet there.
  std::byte* begin_collecting(int32_t unit) REQUIRES(engine_mutex);
  bool collects_on_device() const { return setup_.traits.gathers; }
  void collected(int32_t unit) REQUIRES(engine_mutex);

  /// Copies leased memory of a device to the host; returns when `to` is filled. The mutex is not held, since
  /// `to` is not pinned and the copy may block the submitting thread. Throws kernels::DeviceError.
  void copy_to_host(const Block& block, std::span<std::byte> to, const std::byte* from)
      EXCLUDES(engine_mutex);

  /// The longest run of the arena that is free now.
  int64_t largest_free_run() const REQUIRES(engine_mutex) { return host_arena_.largest_free_run(); }

  bool ready(int32_t unit) const REQUIRES(engine_mutex) {
    return model_.units[unit].gathered == Gathered::ready;
  }

 private:
  struct Fetch {  // one chunk's read into a block
    Gatherer* owner = nullptr;
    Block* block = nullptr;
    int32_t chunk = -1;
    io::Transfer transfer;
  };
  enum class Urgency : uint8_t { demanded, ahead };
  struct Copy {  // of one chunk into a block, not begun
    Block* block = nullptr;
    int32_t chunk = -1;
    Urgency urgency{};
  };
  static void on_fetched(io::Transfer& transfer) noexcept;
  class WaitingForRoom;

  bool start_fill(int32_t unit, Urgency urgency) REQUIRES(engine_mutex);
  bool waits_for_update_to_nvme(int32_t unit) const REQUIRES(engine_mutex);
  Block* take_block(int32_t unit, Urgency urgency) REQUIRES(engine_mutex);
  void start_fills_ahead() REQUIRES(engine_mutex);
  int32_t victim_for(int32_t unit, Urgency urgency) const REQUIRES(engine_mutex);
  bool make_room(int32_t unit, Urgency urgency) REQUIRES(engine_mutex);
  void bring(Block& block, int32_t chunk, Urgency urgency) REQUIRES(engine_mutex);
  void fetch(Block& block, int32_t chunk, Urgency urgency) REQUIRES(engine_mutex);
  void make_copies() MAY_RELEASE(engine_mutex);
  bool may_copy_served() const REQUIRES(engine_mutex) {
    return serve_.arriving == 0 && !after_serve_.empty();
  }
  void make_next(std::vector<Copy>& copies) MAY_RELEASE(engine_mutex);
  void make(const Copy& copy) MAY_RELEASE(engine_mutex);
  void arrived(Block& block) REQUIRES(engine_mutex);
  void to_device(Block& block) REQUIRES(engine_mutex);
  void finish(Block& block) REQUIRES(engine_mutex);
  void drop(Block& block) REQUIRES(engine_mutex);
  std::optional<int64_t> host_room(int64_t bytes, RangeAllocator::End end) REQUIRES(engine_mutex);
  bool keeps_bounce(const Block& block) const REQUIRES(engine_mutex);
  std::optional<kernels::Event> copy_under_way() const REQUIRES(engine_mutex);
  void free_bounce(Block& block) REQUIRES(engine_mutex);
  int64_t host_bytes(int32_t unit) const {
    return host_block_bytes(setup_.layout, setup_.layout.units[unit], setup_.traits,
                            setup_.plan.weights_on_nvme[unit]);
  }
  /// The caller waits for the unit's weights; the rounds tell other ranks, where there are any.
  Awaiting await(int32_t unit) REQUIRES(engine_mutex) {
    if (setup_.layout.slices > 1) core_.changed.notify_all();
    return {demand_, unit};
  }
  bool lies_whole(int32_t unit) const { return setup_.weight_place(unit) == WeightPlace::whole_on_host; }
  std::string leased_units() const REQUIRES(engine_mutex);
  bool filling_anything() const REQUIRES(engine_mutex);
  const std::byte* weights_in_memory(int32_t chunk) const REQUIRES(engine_mutex);
  const std::byte* kept_for_others(int32_t chunk) const REQUIRES(engine_mutex);
  /// Where a chunk's weights belong in a block.
  std::byte* place_of(const Block& block, int32_t chunk) const REQUIRES(engine_mutex) {
    const Chunk& c = setup_.layout.chunks[chunk];
    return block.shard + c.begin * setup_.layout.units[c.unit].element_bytes;
  }

  const Setup& setup_;
  Core& core_;
  Hardware& hardware_;
  ModelStates& model_;
  Demand& demand_;
  Trace trace_ GUARDED_BY(engine_mutex);
  LinkedMemory host_memory_;
  kernels::DeviceMemory device_memory_;
  RangeAllocator host_arena_ GUARDED_BY(engine_mutex);
  RangeAllocator device_arena_ GUARDED_BY(engine_mutex);
  std::unique_ptr<kernels::Stream> stream_;
  Mutex looking_ ACQUIRED_BEFORE(engine_mutex);
  std::unique_ptr<kernels::Stream> looks_ PT_GUARDED_BY(looking_);
  std::vector<std::unique_ptr<Block>> blocks_ GUARDED_BY(engine_mutex);
  std::vector<Block*> idle_blocks_ GUARDED_BY(engine_mutex);
  std::vector<Fetch> fetches_ GUARDED_BY(engine_mutex);     // by chunk
  std::vector<Copy> copies_ GUARDED_BY(engine_mutex);       // to be made, oldest first
  std::vector<Copy> after_serve_ GUARDED_BY(engine_mutex);  // to be made from serve_, once that has arrived
  int waiting_for_room_ GUARDED_BY(engine_mutex) = 0;       // callers
  SlotOwner* slots_ = nullptr;
  LinkedMemory serve_memory_;
  Block serve_ GUARDED_BY(engine_mutex);  // a shard on its way to other ranks; unit -1: none
  std::vector<Fetch> serve_fetches_ GUARDED_BY(engine_mutex);  // by chunk
  std::vector<Block*> pinned_ GUARDED_BY(engine_mutex);
  PartReader parts_;
};

}  // namespace overspill::engine
