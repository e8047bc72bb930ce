// The ring: a few slots of one chunk's states each. Components on NVMe come to the update through a slot, and
// their new version goes back from there. A slot is held from the read of a chunk until its new version is
// written, or until the copy in it is given up. Completions of transfers take the engine's mutex.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/memory/host_memory.h"
#include "engine/plan/setup.h"
#include "engine/weights/gather.h"
#include "io/sealed.h"
#include "io/store.h"

namespace overspill::engine {

using Extents = std::array<io::Extent, kComponents>;  // one of each component in the store

class StateRing final : public SlotOwner {
 public:
  /// The updater, which uses the slots.
  class User {
   public:
    /// The new version is in the store, in ChunkState::guessed_extents (none after a failed engine), and the
    /// slot is free again.
    virtual void written(int32_t chunk) REQUIRES(engine_mutex) = 0;
    /// A slot came free, or a chunk is staged: more may be started.
    virtual void pump() REQUIRES(engine_mutex) = 0;

   protected:
    ~User() = default;
  };

  /// Throws std::logic_error where the plan's slots are too small for a chunk. The user outlives the ring.
  StateRing(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, User& user);
  StateRing(const StateRing&) = delete;
  StateRing& operator=(const StateRing&) = delete;

  bool has_free() const REQUIRES(engine_mutex);
  /// Frees a slot whose chunk was read ahead and that nobody has asked for yet. False: there is none.
  bool drop_a_copy() REQUIRES(engine_mutex);

  /// home -> reading: reads the chunk's components into a free slot, and its spilled gradient if its update
  /// is pending. Throws std::logic_error where no slot is free.
  void read(int32_t chunk) REQUIRES(engine_mutex);
  /// Reads a spilled gradient behind the components of a chunk that is in a slot. step() has decided, so it
  /// is final and written.
  void read_gradient(int32_t chunk) REQUIRES(engine_mutex);
  /// updating -> writing: writes the new version from the chunk's slot to `fresh`.
  void write(int32_t chunk, const Extents& fresh) REQUIRES(engine_mutex);
  /// staged, updating or writing -> home: frees the slot and forgets its content.
  void release(int32_t chunk) REQUIRES(engine_mutex);
  /// Gives up all slots; at_rest() has to hold.
  void release_all() REQUIRES(engine_mutex);

  /// The chunk is staged, and nothing moves to its slot or is copied from there.
  bool ready(int32_t chunk) const REQUIRES(engine_mutex);
  /// Nothing moves, and whatever is in a slot is a copy.
  bool at_rest() const REQUIRES(engine_mutex);

  int32_t slots() const REQUIRES(engine_mutex) { return static_cast<int32_t>(slots_.size()); }
  /// -1: the slot is free.
  int32_t chunk_in(int32_t slot) const REQUIRES(engine_mutex) { return slots_[slot].chunk; }

  // Of a chunk that is in a slot:
  std::span<io::Sealed> states(int32_t chunk) REQUIRES(engine_mutex) {
    return of(chunk).states;
  }  // by component
  std::byte* gradient(int32_t chunk) REQUIRES(engine_mutex) {
    return of(chunk).gradient.memory;
  }  // null until it is read
  /// Of a component in the store.
  std::span<std::byte> memory(int32_t chunk, Component component) REQUIRES(engine_mutex);

  void lend(int32_t chunk) REQUIRES(engine_mutex) override;
  void returned(int32_t chunk) REQUIRES(engine_mutex) override;

 private:
  struct Slot {
    StateRing* ring = nullptr;
    std::byte* memory = nullptr;
    int32_t index = 0;
    int32_t chunk = -1;
    int32_t in_flight = 0;  // transfers, and copies of weights from the slot; at rest 0
    std::array<io::Transfer, kComponents> transfers;
    std::vector<io::Sealed>
        states;             // by component; weights are checked on arrival, since others use them too
    io::Transfer gradient;  // a spilled one; read once its step is decided, memory null until then
  };

  void check_slots() const;
  size_t slot_of(int32_t chunk) const REQUIRES(engine_mutex);
  Slot& of(int32_t chunk) REQUIRES(engine_mutex) { return slots_[slot_of(chunk)]; }
  const Slot& of(int32_t chunk) const REQUIRES(engine_mutex) { return slots_[slot_of(chunk)]; }
  bool is_copy(const Slot& slot) const REQUIRES(engine_mutex);
  int64_t components_bytes(int32_t chunk) const;
  static void on_transfer(io::Transfer& transfer) noexcept;
  void moved(Slot& slot) REQUIRES(engine_mutex);
  void ends_writing(Slot& slot) REQUIRES(engine_mutex);
  void release(Slot& slot) REQUIRES(engine_mutex);

  const Setup& setup_;
  Core& core_;
  ModelStates& model_;
  User& user_;
  HostMemory memory_;
  std::vector<Slot> slots_ GUARDED_BY(engine_mutex);
};

}  // namespace overspill::engine
