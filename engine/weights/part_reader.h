// Weights that no lease holds whole (UnitSpec::part_bytes): a part of a unit is copied to the caller, while
// the chunks that follow are read ahead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/memory/host_memory.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

class Gatherer;

/// Any threads; one reads at a time.
class PartReader {
 public:
  /// The gatherer outlives this.
  PartReader(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, Gatherer& gatherer);
  PartReader(const PartReader&) = delete;
  PartReader& operator=(const PartReader&) = delete;

  /// Fills `to` with the unit's weights from byte `begin` on. The unit is up to date, and nobody changes its
  /// weights before this returns. Throws EngineFailed, where a read has failed too.
  void read(int32_t unit, int64_t begin, std::span<std::byte> to) EXCLUDES(turn_, engine_mutex);
  /// To be called before weights change: drops what was read ahead, and waits for reads in flight.
  void forget() MAY_RELEASE(engine_mutex);

 private:
  /// Room for one chunk. Chunk c goes into number c modulo their count, so that those of a window of chunks
  /// do not meet.
  struct Slot {
    PartReader* owner = nullptr;
    int32_t chunk = -1;
    bool reading = false;
    io::Transfer transfer;
  };
  static void on_read(io::Transfer& transfer) noexcept;
  void ask(int32_t chunk, io::Transfer::Priority priority) REQUIRES(engine_mutex);
  void ask_from(int32_t chunk) REQUIRES(engine_mutex);
  void take(int32_t chunk, int64_t begin, std::span<std::byte> to) MAY_RELEASE(engine_mutex);
  void wait_for(Slot& slot) MAY_RELEASE(engine_mutex);
  Slot* slot_of(int32_t chunk) REQUIRES(engine_mutex) {
    return slots_.empty() ? nullptr : &slots_[static_cast<size_t>(chunk) % slots_.size()];
  }

  const Setup& setup_;
  Core& core_;
  ModelStates& model_;
  Gatherer& gatherer_;
  Mutex turn_ ACQUIRED_BEFORE(engine_mutex);
  HostMemory memory_;
  std::vector<Slot> slots_ GUARDED_BY(engine_mutex);
};

}  // namespace overspill::engine
