// Where every parameter lies in its unit's flat space, how that space is cut into shards, and shards into
// chunks.
//
// Worked example: two ranks, bf16, parameters of 5,000 and 100 elements. Segments start at 0 and 5,024
// (64-byte alignment); 5,124 elements are padded to 8,192 = 2 ranks x 2 x 2,048, because 2,048 elements are
// the fewest whose every component fills whole 4 KiB blocks; a shard is 4,096 elements. In the format 8bit
// segments start at multiples of 64 elements, so that no two share a scale; shards and chunks start at such
// multiples in every format.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/partition/model.h"

namespace overspill::engine {

/// An array of a shard, by its place among the unit's components. `hi`, the weight as forward uses it, is
/// first in every format. Then come the remaining bits of the exact weight, then the optimizer's states.
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
  int64_t parameters = 0;  // numbers that the elements stand for; packed elements hold several
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
  int32_t slice = 0;      // the unit's slice that it lies in
  std::vector<Run> runs;  // this rank's, ascending; elements outside of them are padding

  /// Whether a segment that is marked (by segment of the unit, not 0) has elements here.
  bool has_any(const std::vector<uint8_t>& marked) const;
};

struct Unit {
  std::string name;
  UnitFormat format;
  optim::Optimizer optimizer{};
  std::string dtype;
  std::string packing;         // of a frozen one, for the plan
  int32_t together = -1;       // as of UnitSpec
  int64_t part_bytes = 0;      // as of UnitSpec
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
  /// The components of a trainable unit, hi first; of a frozen unit hi alone.
  std::span<const optim::ComponentSpec> components() const;
  std::string_view component_name(Component component) const;
  bool has(Component component) const;
  /// Bytes of one element, without scales. The unit must have the component.
  int64_t component_element_bytes(Component component) const;
  bool scaled(Component component) const;
  /// The component that has this name, kComponents where there is none.
  int component_named(std::string_view name) const;
  /// Bytes that `elements` elements of a component take in memory and in the store: whole blocks of 4 KiB
  /// where `elements` is a chunk's. 0 where the unit has no such component.
  int64_t component_bytes(Component component, int64_t elements) const;
  /// Of all components but hi.
  int64_t state_bytes(int64_t elements) const;
};

/// A rank holds its shard of each unit, and sums the gradients of its slice. The two are the same except at
/// stage 0: there every rank's shard is the whole unit, and each rank sums one slice of it. No chunk crosses
/// a slice, so squares are added in the same order at every stage.
struct Layout {
  int shard = 0;   // number of this rank's shard, 0 at stage 0
  int shards = 1;  // shards per unit, 1 at stage 0
  int slice = 0;   // number of this rank's slice
  int slices = 1;  // slices per unit: the ranks
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
