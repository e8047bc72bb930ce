#include "engine/partition/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "engine/partition/strides.h"

namespace overspill::engine {
namespace {

constexpr int64_t kSegmentAlignBytes = 64;
constexpr int64_t kTransferBlockBytes = 4096;  // transfers to the store are whole blocks
constexpr int64_t kElementsMax = int64_t{1} << 48;
constexpr std::string_view kFrozenName = "frozen";

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

int64_t count_elements(const SegmentSpec& spec) {
  int64_t elements = 1;
  for (int64_t extent : spec.shape) {
    if (extent < 0 || (extent > 0 && elements > kElementsMax / extent)) {
      throw std::invalid_argument(
          fmt::format("parameter {}: dimension {} is out of range", spec.name, extent));
    }
    elements *= extent;
  }
  return elements;
}

std::vector<int64_t> strides_of(const SegmentSpec& spec) {
  auto strides = normal_strides(spec.shape, spec.strides);
  if (!strides) {
    throw std::invalid_argument(
        fmt::format("parameter {}: strides ({}) are no permutation of a dense tensor of shape ({}); make it "
                    "contiguous",
                    spec.name, fmt::join(spec.strides, ", "), fmt::join(spec.shape, ", ")));
  }
  return *std::move(strides);
}

void check_format(const UnitSpec& spec) {
  if (spec.format && spec.dtype != weights_dtype(spec.format)) {
    throw std::invalid_argument(fmt::format("unit {}: format {} does not fit dtype {}", spec.name,
                                            format_name(spec.format), spec.dtype));
  }
  if (dtype_bytes(spec.dtype) == 0) {
    throw std::invalid_argument(fmt::format("unit {}: unknown dtype '{}'", spec.name, spec.dtype));
  }
  if (spec.segments.empty()) throw std::invalid_argument(fmt::format("unit {} has no parameters", spec.name));
}

/// The fewest elements whose every component fills whole blocks.
int64_t granule_of(const Unit& unit) {
  int64_t narrowest = unit.element_bytes;
  for (const optim::ComponentSpec& spec : unit.components())
    narrowest = std::min<int64_t>(narrowest, spec.element_bytes);
  return kTransferBlockBytes / narrowest;
}

/// Where segments may start: vectorised kernels of the framework give other bits at 4 bytes off, and elements
/// under one scale are updated together.
int64_t alignment_of(const Unit& unit) {
  int64_t align = std::max<int64_t>(1, kSegmentAlignBytes / unit.element_bytes);
  for (const optim::ComponentSpec& spec : unit.components()) {
    if (spec.scaled) align = std::max(align, optim::kScaleBlock);
  }
  return align;
}

std::vector<Run> runs_of(const Unit& unit, int64_t begin, int64_t elements) {
  std::vector<Run> runs;
  for (size_t i = 0; i < unit.segments.size(); ++i) {
    const Segment& segment = unit.segments[i];
    const int64_t from = std::max(begin, segment.begin);
    const int64_t to = std::min(begin + elements, segment.begin + segment.elements);
    if (from < to) runs.push_back({static_cast<int32_t>(i), from - begin, to - from});
  }
  return runs;
}

Unit place_segments(const UnitSpec& spec, std::unordered_set<std::string>& names) {
  check_format(spec);
  Unit unit;
  unit.name = spec.name;
  unit.format = spec.format;
  unit.optimizer = spec.optimizer;
  unit.dtype = spec.dtype;
  unit.packing = spec.packing;
  unit.together = spec.together;
  unit.part_bytes = spec.part_bytes;
  unit.element_bytes = dtype_bytes(spec.dtype);
  const int64_t align = alignment_of(unit);
  int64_t end = 0;
  for (const SegmentSpec& segment : spec.segments) {
    if (!names.insert(segment.name).second) {
      throw std::invalid_argument(fmt::format("parameter {} is declared twice", segment.name));
    }
    const int64_t elements = count_elements(segment);
    unit.segments.push_back({segment.name, segment.aliases, segment.shape, strides_of(segment), segment.group,
                             end, elements, segment.parameters > 0 ? segment.parameters : elements,
                             segment.in_norm});
    end = round_up(end + elements, align);
  }
  unit.elements = std::max<int64_t>(end, align);
  return unit;
}

}  // namespace

std::string_view format_name(UnitFormat format) {
  return format ? optim::name(*format) : kFrozenName;
}

UnitFormat format_from_name(std::string_view name) {
  if (name == kFrozenName) return kFrozen;
  return optim::format_named(name);
}

std::string_view weights_dtype(UnitFormat format) {
  if (!format) return "";
  switch (*format) {
    case optim::Format::fp32:
      return "F32";
    case optim::Format::fp16:
      return "F16";
    case optim::Format::exact:
    case optim::Format::compact:
    case optim::Format::eight_bit:
      return "BF16";
  }
  return "";
}

int64_t dtype_bytes(std::string_view dtype) {
  static constexpr std::array<std::pair<std::string_view, int64_t>, 16> kBytes = {{{"BOOL", 1},
                                                                                   {"U8", 1},
                                                                                   {"I8", 1},
                                                                                   {"F8_E4M3", 1},
                                                                                   {"F8_E5M2", 1},
                                                                                   {"I16", 2},
                                                                                   {"U16", 2},
                                                                                   {"F16", 2},
                                                                                   {"BF16", 2},
                                                                                   {"I32", 4},
                                                                                   {"U32", 4},
                                                                                   {"F32", 4},
                                                                                   {"I64", 8},
                                                                                   {"U64", 8},
                                                                                   {"F64", 8},
                                                                                   {"C64", 8}}};
  for (const auto& [name, bytes] : kBytes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

bool Chunk::has_any(const std::vector<uint8_t>& marked) const {
  return std::any_of(runs.begin(), runs.end(), [&](const Run& run) { return marked[run.segment] != 0; });
}

std::span<const optim::ComponentSpec> Unit::components() const {
  if (!trainable()) return {};
  return optim::components(optimizer, *format);
}

bool Unit::has(Component component) const {
  return component == Component::hi || static_cast<size_t>(component) < components().size();
}

int64_t Unit::component_element_bytes(Component component) const {
  return component == Component::hi ? element_bytes
                                    : components()[static_cast<size_t>(component)].element_bytes;
}

bool Unit::scaled(Component component) const {
  return component != Component::hi && components()[static_cast<size_t>(component)].scaled;
}

std::string_view Unit::component_name(Component component) const {
  return trainable() ? components()[static_cast<size_t>(component)].name : "hi";
}

int Unit::component_named(std::string_view name) const {
  for (const Component component : kAllComponents) {
    if (has(component) && component_name(component) == name) return static_cast<int>(component);
  }
  return kComponents;
}

int64_t Unit::component_bytes(Component component, int64_t elements) const {
  if (!has(component)) return 0;
  if (component == Component::hi) return elements * element_bytes;
  const optim::ComponentSpec& spec = components()[static_cast<size_t>(component)];
  return spec.scaled ? round_up(spec.bytes(elements), kTransferBlockBytes) : spec.bytes(elements);
}

int64_t Unit::state_bytes(int64_t elements) const {
  int64_t bytes = 0;
  for (const Component component : kAllComponents) {
    if (component != Component::hi) bytes += component_bytes(component, elements);
  }
  return bytes;
}

StagePolicy stage_policy(int stage) {
  if (stage < 0 || stage > 3)
    throw std::invalid_argument(fmt::format("stage is {}: one of 0, 1, 2, 3", stage));
  return {stage >= 1, stage >= 2, stage >= 3};
}

Layout make_layout(const std::vector<UnitSpec>& specs, int64_t chunk_elements, int rank, int world,
                   int stage) {
  if (specs.empty()) throw std::invalid_argument("a model needs at least one unit");
  if (chunk_elements <= 0) throw std::invalid_argument("chunk_elements must be positive");
  Layout layout;
  layout.policy = stage_policy(stage);
  layout.shard = layout.policy.divide_states ? rank : 0;
  layout.shards = layout.policy.divide_states ? world : 1;
  layout.slice = rank;
  layout.slices = world;
  std::unordered_set<std::string> names;
  for (const UnitSpec& spec : specs) {
    Unit unit = place_segments(spec, names);
    const int64_t granule = granule_of(unit);
    unit.elements = round_up(unit.elements, granule * world);
    unit.shard_elements = unit.elements / layout.shards;
    unit.slice_elements = unit.elements / world;
    // Equal pieces, so that the ring's slots (sized by the largest) are filled.
    const int64_t pieces = (unit.slice_elements + chunk_elements - 1) / chunk_elements;
    const int64_t piece = round_up((unit.slice_elements + pieces - 1) / pieces, granule);
    unit.first_chunk = static_cast<int32_t>(layout.chunks.size());
    const auto index = static_cast<int32_t>(layout.units.size());
    const int64_t shard_begin = layout.shard * unit.shard_elements;
    for (int64_t slice = shard_begin / unit.slice_elements;
         slice * unit.slice_elements < shard_begin + unit.shard_elements; ++slice) {
      for (int64_t in_slice = 0; in_slice < unit.slice_elements; in_slice += piece) {
        const int64_t begin = slice * unit.slice_elements + in_slice;
        const int64_t elements = std::min(piece, unit.slice_elements - in_slice);
        layout.chunks.push_back({index, begin - shard_begin, elements, static_cast<int32_t>(slice),
                                 runs_of(unit, begin, elements)});
      }
    }
    unit.chunk_count = static_cast<int32_t>(layout.chunks.size()) - unit.first_chunk;
    layout.units.push_back(std::move(unit));
  }
  return layout;
}

}  // namespace overspill::engine
