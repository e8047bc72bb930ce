// The model's states ("ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", Rajbhandari et
// al. 2020, section 3: parameters, gradients and optimizer states) as this rank has them: where the bytes of
// every unit and chunk are, and the host memory that holds those that stay there.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cpu_optim/optimizer.h"
#include "engine/core/engine_mutex.h"
#include "engine/core/hardware.h"
#include "engine/memory/host_memory.h"
#include "engine/memory/linked_memory.h"
#include "engine/plan/setup.h"
#include "io/store.h"
#include "kernels/device.h"

namespace overspill::engine {

/// Where a chunk's components are beside their homes (the arena in host memory, or extents of the store).
enum class Residency : uint8_t {
  home,      // nowhere else; no ring slot is held
  reading,   // a slot is held, extents -> slot in flight
  staged,    // the slot holds a copy; the extents are valid
  updating,  // a worker rewrites it; chunks wholly on the host pass through this state too, without a slot
  writing,   // the slot holds the new version, its way to new extents is in flight; the old extents are still
             // held
};

/// An update made before step() has decided (states/speculation.h).
enum class Guess : uint8_t {
  none,
  wanted,   // may be staged and made
  running,  // a worker makes it
  made,     // the new version is there: its states in the slot or in guessed_extents
  taking,   // a worker brings its weights home
};
enum class Verdict : uint8_t { open, take, drop };

/// What a snapshot (states/snapshot.h) still has to do with a chunk.
enum class Saving : uint8_t {
  none,     // nothing
  awaited,  // to be taken after the update that is scheduled
  due,      // to be taken before the next change
  taking,   // somebody takes it: nobody else may change it
};

/// Members without GUARDED_BY are addresses that the constructor sets for good. One exception: a guess that
/// is taken swaps `home` and `second`, under the mutex; no guess is undecided when code reads them without
/// it.
struct ChunkState {
  Residency residency GUARDED_BY(engine_mutex) = Residency::home;
  bool pending GUARDED_BY(engine_mutex) = false;  // step() has scheduled an update that has not been done
  int32_t slot GUARDED_BY(engine_mutex) = -1;     // in the ring
  int64_t position GUARDED_BY(engine_mutex) = 0;  // in the order of the update
  std::array<std::byte*, kComponents> home{};     // components on the host
  /// Components on NVMe; empty: never written, all zero.
  std::array<io::Extent, kComponents> extents GUARDED_BY(engine_mutex){};
  std::byte* staged_weights GUARDED_BY(engine_mutex) = nullptr;  // hi in the slot, where hi lives on NVMe
  std::byte* gradient = nullptr;                                 // on the host; null: spilled, or no gradient
  optim::Element gradient_element GUARDED_BY(engine_mutex){};  // its type now; changes only for spilled ones
  io::Extent gradient_extent GUARDED_BY(engine_mutex);         // of a spilled gradient that was written
  /// The gradient stays after its update, until another comes or it is cleared.
  bool gradient_kept GUARDED_BY(engine_mutex) = false;

  Guess guess GUARDED_BY(engine_mutex) = Guess::none;
  Verdict verdict GUARDED_BY(engine_mutex) = Verdict::open;  // of step(), on a guess
  Saving saving GUARDED_BY(engine_mutex) = Saving::none;
  /// Extents of the guessed version once it is written; empty until then.
  std::array<io::Extent, kComponents> guessed_extents GUARDED_BY(engine_mutex){};
  std::byte* second_weights GUARDED_BY(engine_mutex) = nullptr;  // guessed hi, where hi lives on the host
  std::array<std::byte*, kComponents> second{};  // room for a guessed version (Plan::held_twice)

  /// While `writing`: whether the new version is a guess that step() has not taken.
  bool writes_a_guess() const REQUIRES(engine_mutex) {
    return guess == Guess::made && verdict != Verdict::take;
  }

  /// The state changes that are allowed; anything else is a bug and throws.
  void become(Residency next) REQUIRES(engine_mutex);
};

/// State of the gathered copy of a unit whose weights cannot be used at their home.
enum class Gathered : uint8_t {
  absent,      // no memory
  filling,     // block held; this rank's chunks are arriving in it
  local,       // this rank's shard is complete
  collecting,  // the all-gather runs
  ready,       // may be leased
};

struct Block;  // block.h

/// Members without GUARDED_BY are addresses that are set once. One exception: `gradients` in a pool changes,
/// under the mutex, while no thread adds or sums gradients of the unit.
struct UnitState {
  Gathered gathered GUARDED_BY(engine_mutex) = Gathered::absent;
  Block* block GUARDED_BY(engine_mutex) = nullptr;
  std::byte* home = nullptr;   // hi of this rank's shard, on the host
  std::byte* whole = nullptr;  // hi of all shards, where the unit lies whole on every rank; home lies in it
  /// hi of this rank's shard, where it lives on the device; `copied`: it is the newest.
  Block* on_device = nullptr;
  bool wanted GUARDED_BY(engine_mutex) = false;  // there: gathered as soon as this rank's shard is up to date
  /// The last copy of its weights to the device; it may read `home`.
  kernels::Event copied GUARDED_BY(engine_mutex);
  std::byte* gradients = nullptr;  // all ranks' elements, in flight; null: by chunk, or with one rank there
  int32_t pending_chunks GUARDED_BY(engine_mutex) = 0;
  int64_t generation GUARDED_BY(engine_mutex) = 0;  // of the weights
  // Captured by step(), by segment:
  std::vector<optim::Factors> factors GUARDED_BY(engine_mutex);
  std::vector<uint8_t> updated GUARDED_BY(engine_mutex);  // has a gradient in this step
  std::vector<int64_t> steps GUARDED_BY(engine_mutex);    // updates so far
  // Captured when the unit's gradients seemed final, by segment:
  std::vector<optim::Factors> guessed_factors GUARDED_BY(engine_mutex);
  std::vector<uint8_t> guessed GUARDED_BY(engine_mutex);  // has a gradient
};

class ModelStates {
 public:
  /// Allocates what the plan puts on the host. Throws BudgetError, kernels::DeviceError.
  ModelStates(const Setup& setup, Hardware& hardware);
  ModelStates(const ModelStates&) = delete;
  ModelStates& operator=(const ModelStates&) = delete;

  std::vector<UnitState> units;    // as many as long as the engine lives; their members say what guards them
  std::vector<ChunkState> chunks;  // the same

 private:
  template <class Carver>
  void carve_gradients(const Setup& setup, int32_t unit,
                       Carver& carver) NO_THREAD_SAFETY_ANALYSIS;  // of the constructor: nobody else is here

  LinkedMemory linked_;  // weights and gradients on the host: they come from a device, or go there
  HostMemory states_;    // on the host
  HostMemory second_;    // versions of what is held twice
};

}  // namespace overspill::engine
