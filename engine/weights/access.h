// Reads and writes components at their homes, outside the step: for loading, reading and checkpoints. One
// chunk's component at a time, through one scratch buffer. The updater must be quiescent; one thread at a
// time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/device/device_units.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

/// Weights are converted in pieces of this many elements, so that a large unit needs no memory of its size.
inline constexpr int64_t kPieceElements = 256 * 1024;

class Access {
 public:
  Access(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, DeviceUnits& device_units);

  // `begin` and counts are elements of this rank's shard. Each throws StoreError, and std::invalid_argument
  // for a component that the unit lacks. A write to NVMe makes a whole new extent for each chunk that it
  // touches, and releases the old one.

  /// Copies `to.size()` bytes' worth of elements of a component without scales.
  void read(int32_t unit, Component component, int64_t begin, std::span<std::byte> to) EXCLUDES(engine_mutex);
  void write(int32_t unit, Component component, int64_t begin, std::span<const std::byte> from)
      EXCLUDES(engine_mutex);

  /// A chunk's component as stored; valid until the next call.
  std::span<const std::byte> whole(int32_t chunk, Component component) EXCLUDES(engine_mutex);

  /// Sets `elements` of a component without scales to zero.
  void clear(int32_t unit, Component component, int64_t begin, int64_t elements) EXCLUDES(engine_mutex);

  /// Writes `elements` elements of any component, from element `skip` of `piece` on. `piece` has the bytes of
  /// `piece_elements` elements, then their scales. With scales, `begin` and `skip` must be multiples of the
  /// scale's block.
  void write_piece(int32_t unit, Component component, int64_t begin, int64_t elements,
                   std::span<const std::byte> piece, int64_t piece_elements, int64_t skip)
      EXCLUDES(engine_mutex);

  /// Where elements of a component are, in their order, if all of them are in memory; nothing otherwise. Any
  /// threads may write there what write_piece() would, each other bytes.
  std::vector<std::span<std::byte>> at_home(int32_t unit, Component component, int64_t begin,
                                            int64_t elements);

  /// Reads or writes the fp32 master of a trainable unit, converting from or to its format (Format::eight_bit
  /// keeps 24 bits).
  void read_weights(int32_t unit, int64_t begin, std::span<float> values) EXCLUDES(engine_mutex);
  void write_weights(int32_t unit, int64_t begin, std::span<const float> values) EXCLUDES(engine_mutex);
  /// Makes weights that were replaced in `hi` the master; `hi` is what was written.
  void match_master(int32_t unit, int64_t begin, std::span<const std::byte> hi) EXCLUDES(engine_mutex);

  /// Reads a state of the optimizer as fp32 values; sets it to one value or to many, rounded to the nearest
  /// that the format has. With scales, `begin` must be a multiple of their block, and the last block must
  /// hold no other elements of the unit.
  void read_state(int32_t unit, Component component, int64_t begin, std::span<float> values)
      EXCLUDES(engine_mutex);
  void fill_state(int32_t unit, Component component, int64_t begin, int64_t elements, float value)
      EXCLUDES(engine_mutex);
  void write_state(int32_t unit, Component component, int64_t begin, std::span<const float> values)
      EXCLUDES(engine_mutex);

  /// Makes a written extent of the store the chunk's component, without a copy: one that was released and
  /// that pins keep, or the one that it is already. False where somebody else owns it.
  bool take(int32_t chunk, Component component, const io::Extent& extent) EXCLUDES(engine_mutex);

  /// Where a component on NVMe is now; empty: it was never written.
  io::Extent extent_of(int32_t chunk, Component component) EXCLUDES(engine_mutex) {
    const MutexLock lock(core_.mutex());
    return model_.chunks[chunk].extents[static_cast<size_t>(component)];
  }

 private:
  struct Part {
    int32_t chunk;
    int64_t in_chunk;  // first element, from the chunk's
    int64_t in_span;   // from `begin`
    int64_t elements;
  };
  template <class Visit>
  void for_each_part(int32_t unit, Component component, int64_t begin, int64_t elements, Visit visit);
  template <class Visit>
  void read_parts(int32_t unit, Component component, int64_t begin, int64_t elements, Visit visit);
  template <class Visit>
  void write_parts(int32_t unit, Component component, int64_t begin, int64_t elements, Visit visit);
  template <class Visit, class Away>
  void write_parts_together(int32_t unit, Component component, int64_t begin, int64_t elements, Visit visit,
                            Away away);
  template <class Visit>
  void write_away(Component component, const Part& part, Visit visit);
  template <class Values>
  void store_states(int32_t unit, Component component, int64_t begin, int64_t elements, Values values_of);
  void load(int32_t chunk, Component component) EXCLUDES(engine_mutex);
  void store(int32_t chunk, Component component) EXCLUDES(engine_mutex);
  /// The caller holds a StoreGate::Kept. The store may move a write: `extent` is then the new one.
  void transfer(io::Transfer::Kind kind, io::Extent& extent) EXCLUDES(engine_mutex);

  bool on_device(int32_t chunk) const { return setup_.lives_on_device(setup_.layout.chunks[chunk].unit); }
  std::span<std::byte> scratch_of(int32_t chunk, Component component);

  const Setup& setup_;
  Core& core_;
  Hardware& hardware_;
  ModelStates& model_;
  DeviceUnits& device_units_;
  LinkedMemory scratch_;
};

}  // namespace overspill::engine
