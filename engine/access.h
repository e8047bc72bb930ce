// Components at their homes, reached from outside the step: loading, reading, checkpoints. One chunk's
// component at a time, through one scratch buffer. The updater is quiescent and stays so; one thread at a
// time.
#pragma once

#include <cstdint>
#include <semaphore>
#include <span>

#include "engine/schedule/context.h"

namespace overspill::engine {

class Access {
 public:
  explicit Access(Context& context);

  /// Copies `to.size()` bytes' worth of elements from element `begin` of this rank's shard. Throws
  /// StoreError.
  void read(int32_t unit, Component component, int64_t begin, std::span<std::byte> to);

  /// Replaces them. On NVMe a whole new extent is written for each chunk touched, and the old one released.
  void write(int32_t unit, Component component, int64_t begin, std::span<const std::byte> from);

  /// Sets `elements` to zero.
  void clear(int32_t unit, Component component, int64_t begin, int64_t elements);

 private:
  template <class Visit>
  void for_each_chunk(int32_t unit, Component component, int64_t begin, int64_t elements, Visit visit);
  void load(int32_t chunk, Component component);
  void store(int32_t chunk, Component component);
  /// A write may be moved: `extent` is then the new one.
  void transfer(io::Transfer::Kind kind, io::Extent& extent);

  Context& context_;
  HostMemory scratch_;
  std::binary_semaphore done_{0};  // outlives the completion that releases it
};

}  // namespace overspill::engine
