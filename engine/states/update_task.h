// One chunk's update as a worker makes it: no lock, no other part of the engine. The worker has exclusive use
// of the chunk while the task runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu_optim/update.h"
#include "engine/partition/layout.h"
#include "io/sealed.h"

namespace overspill::engine {

/// One chunk's components where their newest version is in memory: in the ring slot, or at home.
struct ChunkMemory {
  std::array<std::byte*, kComponents> component{};
  int64_t index = 0;  // of the chunk's first element in its unit, over all ranks
  uint64_t seed = 0;
};

/// The fused pass over elements begin <= i < end of one chunk, segment by segment: `factors` and `present`
/// are the unit's, by segment.
void update_chunk(const Unit& unit, const Chunk& chunk, std::span<const optim::Factors> factors,
                  std::span<const uint8_t> present, const ChunkMemory& memory, optim::Gradient gradients,
                  optim::Range within);

/// One update in memory, with the clearing, copying and comparing of checksums that it needs. It refers to
/// memory and owns none.
struct UpdateTask {
  const Unit& unit;
  const Chunk& chunk;
  ChunkMemory memory;
  std::byte* gradients = nullptr;
  optim::Element element = optim::Element::fp32;  // of the gradients
  std::span<const optim::Factors> factors{};      // by segment of the unit
  std::span<const uint8_t> present{};             // by segment of the unit
  std::span<io::Sealed> states{};                 // by component; empty: they live on the host
  /// By component: the old version to copy to `memory` first; null: it is there already.
  std::array<const std::byte*, kComponents> old{};
  std::array<std::span<std::byte>, kComponents> never_written{};  // in the slot; they are zero

  /// Works block by block: it compares a block of states with its checksum, updates it, and checksums it for
  /// the write while it is in the cache. Components to copy are copied block by block, too. `store` is where
  /// the states were read: a block that differs from its checksum is read there again. Null where `states` is
  /// empty. Throws StoreError{corrupt}.
  void run(io::Store* store);

 private:
  bool copies() const;
  int64_t elements_at_a_time() const;
  void copy(int64_t begin, int64_t end) const;
};

}  // namespace overspill::engine
