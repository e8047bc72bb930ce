// Tensors that autograd saves in forward for backward, as bytes: in an arena of the host budget, and beyond
// that on NVMe.
//
// Backward takes tensors in the reverse order of forward, so the arena keeps the newest. The oldest is
// written out first, which is Belady's rule for that order (L. A. Belady, "A study of replacement algorithms
// for a virtual-storage computer", 1966), and ahead of need: while less than a quarter of the arena is free.
// When backward takes a tensor, those before it are read into what is free. Another order costs reads on
// demand; the bytes are the same.
//
// Activations are no part of a checkpoint, and a crash loses them anyway.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>

#include "engine/activation.h"
#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/memory/host_memory.h"
#include "engine/memory/range_allocator.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

/// All methods are called with the engine's mutex held; those with MAY_RELEASE give it up while they wait or
/// copy. Any thread. Errors: a failed transfer fails the engine, and waits then throw EngineFailed.
class ActivationStash {
 public:
  ActivationStash(const Setup& setup, Core& core, Hardware& hardware);

  /// Keeps a copy of `bytes`, and returns its number. Nothing where there will be no room: the arena is
  /// smaller, or tensors that are held fill it. Throws StoreError where the disk has no room for what has to
  /// leave the arena; then nothing was kept.
  std::optional<int64_t> put(std::span<const std::byte> bytes) MAY_RELEASE(engine_mutex);
  /// Holds the tensor in the arena until as many calls of let_go(), and returns its bytes. Throws BudgetError
  /// where tensors that are held fill the arena.
  std::span<std::byte> hold(int64_t number) MAY_RELEASE(engine_mutex);
  void let_go(int64_t number) noexcept REQUIRES(engine_mutex);
  /// The tensor ends, once nobody holds it.
  void drop(int64_t number) noexcept REQUIRES(engine_mutex);

  const ActivationStats& stats() const REQUIRES(engine_mutex) { return stats_; }

 private:
  enum class State : uint8_t {
    filling,  // in the arena, and its bytes are being copied there
    memory,   // in the arena; on NVMe, too, where it has an extent
    writing,  // in the arena, and on its way to NVMe
    nvme,     // on NVMe alone
    reading,  // on its way from NVMe into the arena
  };
  struct Tensor {
    ActivationStash* owner = nullptr;
    int64_t number = 0;
    int64_t bytes = 0;
    int64_t room = 0;    // of the arena, and of an extent
    int64_t place = -1;  // in the arena; -1: it has none
    State state = State::filling;
    int holders = 0;
    bool dropped = false;
    io::Extent extent;
    io::Transfer transfer;
  };

  static void on_transfer(io::Transfer& transfer) noexcept;
  std::optional<int64_t> make_room(int64_t bytes) MAY_RELEASE(engine_mutex);
  void write_behind() MAY_RELEASE(engine_mutex);
  void write_out(Tensor& tensor) MAY_RELEASE(engine_mutex);
  io::Extent allocate(int64_t bytes) MAY_RELEASE(engine_mutex);
  void give_up(io::Extent& extent) REQUIRES(engine_mutex);
  void fetch(Tensor& tensor) MAY_RELEASE(engine_mutex);
  void read_ahead() noexcept REQUIRES(engine_mutex);
  void read(Tensor& tensor, int64_t place, io::Transfer::Priority priority) REQUIRES(engine_mutex);
  /// The oldest that could leave the arena: its bytes are on NVMe (`clean`), or have to be written first.
  Tensor* oldest(bool clean) REQUIRES(engine_mutex);
  void leave_arena(Tensor& tensor) noexcept REQUIRES(engine_mutex);
  void settle(Tensor& tensor) noexcept REQUIRES(engine_mutex);
  void begin_work(Tensor& tensor, State state) REQUIRES(engine_mutex);
  void end_work(Tensor& tensor, State state) noexcept REQUIRES(engine_mutex);
  Tensor& at(int64_t number) REQUIRES(engine_mutex);

  const Setup& setup_;
  Core& core_;
  HostMemory memory_;
  RangeAllocator ranges_ GUARDED_BY(engine_mutex);
  std::map<int64_t, Tensor> tensors_ GUARDED_BY(engine_mutex);  // by number: the oldest first
  int64_t last_ GUARDED_BY(engine_mutex) = 0;                   // number
  int64_t taken_ GUARDED_BY(engine_mutex) = 0;          // the number held last, since the last put(); 0: none
  int64_t leaving_bytes_ GUARDED_BY(engine_mutex) = 0;  // of the arena, that are being written out
  int64_t extent_bytes_ GUARDED_BY(engine_mutex) = 0;   // of the store, that tensors have
  int64_t room_bytes_ GUARDED_BY(engine_mutex) = 0;     // of the store, that is reserved for them
  int64_t working_ GUARDED_BY(engine_mutex) = 0;        // tensors that are filling, writing or reading
  uint64_t changes_ GUARDED_BY(engine_mutex) = 0;       // of anything that may give room
  ActivationStats stats_ GUARDED_BY(engine_mutex);
};

}  // namespace overspill::engine
