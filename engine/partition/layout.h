// Where every parameter lies in its unit's flat space, how that space is cut into shards, and shards into
// chunks.
//
// Worked example: two ranks, bf16, parameters of 5,000 and 100 elements. Segments start at 0 and 5,024
// (64-byte alignment); 5,124 elements are padded to 8,192 = 2 ranks x 2 x 2,048, because 2,048 elements are
// the fewest whose every component fills whole 4 KiB blocks; a shard is 4,096 elements. In the format 8bit
// segments start at multiples of 64 elements, so that none shares a scale with another; shards and chunks do
// in every format.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/partition/model.h"

namespace overspill::engine {

/// An array of a shard (DESIGN 2), by its place among the unit's components: `hi`, the weight as forward uses
/// it, is the first in every format; then what is missing to the exact weight, then the optimizer's states.
enum class Component : uint8_t { hi };
inline constexpr int kComponents = optim::kComponentsMax;
inline constexpr std::array<Component, kComponents> kAllComponents = {Component{0}, Component{1},
                                                                      Component{2}, Component{3}};

/// A parameter's range in its unit's flat space, in elements.
struct Segment {
  std::string name;
  std::vector<std::string> aliases;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // as normal_strides gives them: empty where row-major
  int64_t group = 0;
  int64_t begin = 0;
  int64_t elements = 0;
  int64_t parameters = 0;  // numbers that these stand for
  bool in_norm = true;
};

/// What the ranks divide among them: the stages of ZeRO (Rajbhandari et al. 2020,
/// https://arxiv.org/abs/1910.02054).
struct StagePolicy {
  bool divide_states = true;  // stage 1 on: each rank holds and updates its shard
  bool sum_early = true;      // stage 2 on: gradients are summed in backward, and only the shard is kept
  bool divide_weights =
      true;  // stage 3: weights are gathered for use and given up; else gathered once a step
};
/// Throws std::invalid_argument for anything but 0 to 3.
StagePolicy stage_policy(int stage);

/// The part of a segment that lies in a chunk; `begin` counts from the chunk's first element.
struct Run {
  int32_t segment = 0;
  int64_t begin = 0;
  int64_t elements = 0;
};

/// A piece of this rank's shard of a unit. `begin` counts from the shard's first element.
struct Chunk {
  int32_t unit = 0;
  int64_t begin = 0;
  int64_t elements = 0;
  int32_t slice = 0;      // of the unit, in which it lies
  std::vector<Run> runs;  // this rank's; ascending; the rest is padding

  /// Whether a segment that is marked (by segment of the unit, not 0) has elements here.
  bool has_any(const std::vector<uint8_t>& marked) const;
};

struct Unit {
  std::string name;
  UnitFormat format;
  optim::Optimizer optimizer{};
  std::string dtype;
  std::string packing;         // of a frozen one, for the plan
  int64_t element_bytes = 2;   // of hi
  int64_t elements = 0;        // padded, all ranks
  int64_t shard_elements = 0;  // elements / world
  int64_t slice_elements = 0;  // elements / slices
  int32_t first_chunk = 0;
  int32_t chunk_count = 0;
  std::vector<Segment> segments;

  bool trainable() const { return format.has_value(); }
  int64_t bytes() const { return elements * element_bytes; }
  int64_t shard_bytes() const { return shard_elements * element_bytes; }
  /// What a trainable unit consists of, hi first; of a frozen one nothing is said but its hi.
  std::span<const optim::ComponentSpec> components() const;
  std::string_view component_name(Component component) const;
  bool has(Component component) const;
  /// Of one element, without scales. The unit has the component.
  int64_t component_element_bytes(Component component) const;
  bool scaled(Component component) const;
  /// The component that has this name, kComponents where there is none.
  int component_named(std::string_view name) const;
  /// Memory, and room in the store, of a component of `elements` elements: whole blocks of 4 KiB where
  /// `elements` is a chunk's. 0 where the unit has no such component.
  int64_t component_bytes(Component component, int64_t elements) const;
  /// Of all components but hi.
  int64_t state_bytes(int64_t elements) const;
};

/// Shards are what is held; slices are what gradients are summed in. They are the same, but for stage 0,
/// where every rank's shard is the whole unit and each sums a slice of it: chunks keep to slices, so that
/// squares are added in one order at every stage.
struct Layout {
  int shard = 0;   // which one this rank holds,
  int shards = 1;  // of so many; at stage 0 each rank holds shard 0 of 1
  int slice = 0;   // which one this rank sums: its number among
  int slices = 1;  // all ranks
  StagePolicy policy;
  std::vector<Unit> units;
  std::vector<Chunk> chunks;  // by unit, ascending

  /// Element of the unit's flat space at which the chunk starts on this rank.
  int64_t global_begin(const Chunk& chunk) const {
    return shard * units[chunk.unit].shard_elements + chunk.begin;
  }
};

/// Visits, in order, the runs of this rank's chunks that hold elements of a unit's segment: the chunk, the
/// run's number in it, and where in the segment the run begins.
template <class Visit>
void for_each_run(const Layout& layout, int32_t unit, int32_t segment, Visit visit) {
  const Unit& u = layout.units[unit];
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    const Chunk& chunk = layout.chunks[c];
    for (size_t r = 0; r < chunk.runs.size(); ++r) {
      if (chunk.runs[r].segment != segment) continue;
      visit(c, static_cast<int32_t>(r),
            layout.global_begin(chunk) + chunk.runs[r].begin - u.segments[segment].begin);
    }
  }
}

/// Throws std::invalid_argument naming what is wrong: a unit without segments, a name used twice, a shape
/// that overflows, strides that are no permutation of their shape, a format that does not fit its dtype.
Layout make_layout(const std::vector<UnitSpec>& units, int64_t chunk_elements, int rank, int world,
                   int stage = 3);

}  // namespace overspill::engine
