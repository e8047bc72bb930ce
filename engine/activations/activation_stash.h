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

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
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
/// StoreError where the disk has no room for what has to leave the arena; then all that was put is still
/// there.
class ActivationStash {
 public:
  ActivationStash(const Setup& setup, Core& core, Hardware& hardware);

  /// Keeps a copy of `bytes`, and returns its number. Nothing where there are none, or more than the arena.
  std::optional<int64_t> put(std::span<const std::byte> bytes) MAY_RELEASE(engine_mutex);
  /// Copies the tensor into `to`; std::invalid_argument where that has another size.
  void take(int64_t number, std::span<std::byte> to) MAY_RELEASE(engine_mutex);
  /// The tensor ends. Nobody takes it meanwhile, or later.
  void drop(int64_t number) noexcept REQUIRES(engine_mutex);

  const ActivationStats& stats() const REQUIRES(engine_mutex) { return stats_; }

 private:
  enum class State : uint8_t {
    copying,  // in the arena, and its bytes are being copied there
    memory,   // in the arena; on NVMe, too, where it has an extent
    writing,  // in the arena, and on its way to NVMe
    nvme,     // on NVMe alone
    reading,  // on its way from NVMe into the arena, or about to be
  };
  struct Tensor {
    ActivationStash* owner = nullptr;
    int64_t number = 0;
    int64_t bytes = 0;
    int64_t room = 0;    // of the arena, and of an extent
    int64_t place = -1;  // in the arena; -1: it has none
    State state = State::copying;
    int readers = 0;  // callers of take()
    bool dropped = false;
    io::Extent extent;
    io::Transfer transfer;
  };

  template <class Done>
  void wait(Done done) MAY_RELEASE(engine_mutex);
  static void on_transfer(io::Transfer& transfer) noexcept;
  int64_t make_room(int64_t bytes) MAY_RELEASE(engine_mutex);
  void write_behind() MAY_RELEASE(engine_mutex);
  void write_out(Tensor& tensor) MAY_RELEASE(engine_mutex);
  io::Extent allocate(int64_t bytes) MAY_RELEASE(engine_mutex);
  void grow() MAY_RELEASE(engine_mutex);
  void give_up(io::Extent& extent) REQUIRES(engine_mutex);
  void bring(Tensor& tensor) MAY_RELEASE(engine_mutex);
  void fetch(Tensor& tensor) MAY_RELEASE(engine_mutex);
  void read_ahead() noexcept REQUIRES(engine_mutex);
  void read(Tensor& tensor, int64_t place, io::Transfer::Priority priority) REQUIRES(engine_mutex);
  void leave_arena(Tensor& tensor) noexcept REQUIRES(engine_mutex);
  void settle(Tensor& tensor) noexcept REQUIRES(engine_mutex);
  void become(Tensor& tensor, State state) REQUIRES(engine_mutex);
  Tensor& at(int64_t number) REQUIRES(engine_mutex);
  Tensor& first_of(const std::set<int64_t>& numbers) REQUIRES(engine_mutex) { return at(*numbers.begin()); }

  const Setup& setup_;
  Core& core_;
  HostMemory memory_;
  RangeAllocator ranges_ GUARDED_BY(engine_mutex);
  std::map<int64_t, Tensor> tensors_ GUARDED_BY(engine_mutex);  // by number: the oldest first
  // Numbers of those that are `memory` and nobody reads, without and with an extent, and of those that are
  // `nvme`.
  std::set<int64_t> dirty_ GUARDED_BY(engine_mutex);
  std::set<int64_t> clean_ GUARDED_BY(engine_mutex);
  std::set<int64_t> away_ GUARDED_BY(engine_mutex);
  int64_t last_ GUARDED_BY(engine_mutex) = 0;   // number
  int64_t taken_ GUARDED_BY(engine_mutex) = 0;  // the number taken last, since the last put(); 0: none
  int64_t leaving_bytes_ GUARDED_BY(engine_mutex) = 0;  // of the arena, that are being written out
  int64_t extent_bytes_ GUARDED_BY(engine_mutex) = 0;   // of the store, that tensors have
  int64_t room_bytes_ GUARDED_BY(engine_mutex) = 0;     // of the store, that is reserved for them
  bool growing_ GUARDED_BY(engine_mutex) = false;       // somebody reserves more
  int64_t waiting_ GUARDED_BY(engine_mutex) = 0;        // callers who wait for room
  uint64_t changes_ GUARDED_BY(engine_mutex) = 0;       // of anything that may give room
  ActivationStats stats_ GUARDED_BY(engine_mutex);
};

}  // namespace overspill::engine
