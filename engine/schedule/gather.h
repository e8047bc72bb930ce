// Gathered units: buffers for weights that cannot be used where they lie, filled ahead in traced order, kept
// while there is room and given up farthest-next-use first (Belady 1966, "A study of replacement algorithms
// for a virtual-storage computer").
//
// Every method needs the context's mutex; those that take the lock may release it while they wait for a
// device or copy weights, which may take long. So one thread at a time changes weights (invalidate()), and no
// other acquires meanwhile.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/memory/range_allocator.h"
#include "engine/schedule/context.h"

namespace overspill::engine {

/// Memory of one gathered unit. Lives on, as an orphan, when its unit was updated while somebody still looks
/// at the old weights.
struct Block {
  int32_t unit = -1;
  int32_t leases = 0;
  bool orphan = false;
  int32_t pins = 0;                     // its shard is being sent
  int32_t arriving = 0;                 // chunks not yet in
  int64_t host_offset = -1;             // in the host arena; -1: none
  int64_t device_offset = -1;           // in the device arena; -1: the host memory is the device's
  std::byte* host = nullptr;            // all ranks' shards where they meet there, else this rank's
  std::byte* shard = nullptr;           // this rank's, on the host
  std::byte* device = nullptr;          // what is leased
  kernels::Event copied;                // host -> device done
  std::vector<kernels::Event> uses;     // on callers' queues: done with the device memory
  std::vector<kernels::Stream*> users;  // callers' queues while there are leases; may be given more work
};

/// Who has weights in slots of its own: the updater. Its methods need the context's mutex.
class SlotOwner {
 public:
  /// The weights of a chunk are copied from its slot, without the mutex: until returned() the slot keeps
  /// them.
  virtual void lend(int32_t chunk) = 0;
  virtual void returned(int32_t chunk) = 0;

 protected:
  ~SlotOwner() = default;
};

class Gatherer {
 public:
  explicit Gatherer(Context& context);
  /// Before anything is gathered. The owner outlives all calls.
  void copies_from_slots_of(SlotOwner& owner) { slots_ = &owner; }
  ~Gatherer();  // no lease is left; waits for copies and uses
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  /// Leases the unit's gathered weights: waits until they are read, updated, collected and on their way to
  /// the device. Throws BudgetError when leased units leave no room, kernels::DeviceError.
  Block* acquire(std::unique_lock<std::mutex>& lock, int32_t unit);
  /// Returns when they are there. The block is leased, and the caller does not hold the mutex. Throws
  /// kernels::DeviceError; the lease goes on.
  void wait_for_copy(Block& block);
  /// The queue is given work that reads them: the caller makes it wait for this event first.
  kernels::Event use(Block* block, kernels::Stream& queue);
  /// The memory is in use until `uses` are done. What fails fails the engine.
  void release(Block* block, std::span<const kernels::Event> uses) noexcept;

  /// Starts to fill the units that come next, as far as there is room that is not needed sooner.
  void prefetch(std::unique_lock<std::mutex>& lock);

  /// A worker has made a chunk's new weights and is the only one to touch them: brings them to the unit's
  /// block, where it waits for them.
  void deliver(std::unique_lock<std::mutex>& lock, int32_t chunk, const std::byte* weights);

  /// Gives up the gathered form of units whose weights change now. Waits for reads in flight.
  void invalidate(std::unique_lock<std::mutex>& lock, std::span<const int32_t> units);

  // ---- several ranks: for the rounds (engine/rounds.h)

  /// For a unit that lies whole on every rank: waits until it does.
  void acquire_whole(std::unique_lock<std::mutex>& lock, int32_t unit);
  /// Units that lie whole are gathered when they are up to date.
  void want_whole(std::span<const int32_t> units);

  /// There is room for the unit, and this rank's shard is in it. On a device: nothing there uses the room.
  bool wants(int32_t unit) const;
  /// This rank's shard, up to date, where it is in memory, the device's if it lives there; null: it is not.
  const std::byte* shard_in_memory(int32_t unit) const;
  /// The same; the memory stays until unpin().
  const std::byte* pin_shard(int32_t unit);
  void unpin();
  /// Brings the shard into memory, for others who want it.
  void prepare_to_serve(std::unique_lock<std::mutex>& lock, int32_t unit);
  /// Memory for all ranks' shards, this rank's in its place: the device's where they meet there.
  std::byte* begin_collecting(int32_t unit);
  bool collects_on_device() const { return context_.traits.gathers; }
  bool lives_on_device(int32_t unit) const { return context_.units[unit].resident != nullptr; }
  void collected(int32_t unit);

  /// From leased memory of a device that has its own; returns when `to` is filled. Takes the mutex itself,
  /// and does not hold it meanwhile: nobody pinned `to`, so the device may keep whoever submits the copy.
  /// Throws kernels::DeviceError.
  void copy_to_host(const Block& block, std::span<std::byte> to, const std::byte* from);

  /// The longest run of the arena that is free now.
  int64_t largest_free_run() const { return host_arena_.largest_free_run(); }

  bool ready(int32_t unit) const { return context_.units[unit].gathered == Gathered::ready; }

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

  bool start_fill(int32_t unit, Urgency urgency);
  Block* take_block(int32_t unit, Urgency urgency);
  void start_fills_ahead();
  bool make_room(int32_t unit, Urgency urgency);
  void bring(Block& block, int32_t chunk, Urgency urgency);
  void fetch(Block& block, int32_t chunk, Urgency urgency);
  void make_copies(std::unique_lock<std::mutex>& lock);
  void make(std::unique_lock<std::mutex>& lock, const Copy& copy);
  void arrived(Block& block);
  void to_device(Block& block);
  void finish(Block& block);
  void drop(Block& block);
  std::optional<int64_t> host_room(int64_t bytes, RangeAllocator::End end);
  bool keeps_bounce(const Block& block) const;
  std::optional<kernels::Event> copy_under_way() const;
  void free_bounce(Block& block);
  int64_t host_bytes(int32_t unit) const {
    return host_block_bytes(context_.layout, context_.layout.units[unit], context_.traits,
                            context_.plan.weights_on_nvme[unit]);
  }
  std::string leased_units() const;
  bool filling_anything() const;
  const std::byte* weights_in_memory(int32_t chunk) const;
  /// Where a chunk's weights belong in a block.
  std::byte* place_of(const Block& block, int32_t chunk) const {
    const Chunk& c = context_.layout.chunks[chunk];
    return block.shard + c.begin * context_.layout.units[c.unit].element_bytes;
  }

  Context& context_;
  LinkedMemory host_memory_;
  kernels::DeviceMemory device_memory_;
  RangeAllocator host_arena_;
  RangeAllocator device_arena_;
  std::unique_ptr<kernels::Stream> stream_;
  std::mutex looking_;  // of looks_; taken before the context's
  std::unique_ptr<kernels::Stream> looks_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<Block*> idle_blocks_;
  std::vector<Fetch> fetches_;  // by chunk
  std::vector<Copy> copies_;    // to be made, oldest first
  SlotOwner* slots_ = nullptr;
  LinkedMemory serve_memory_;
  Block serve_;                       // a shard on its way to other ranks; unit -1: none
  std::vector<Fetch> serve_fetches_;  // by chunk
  std::vector<Block*> pinned_;
};

}  // namespace overspill::engine
