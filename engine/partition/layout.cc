#include "engine/partition/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "engine/partition/strides.h"

namespace overspill::engine {
namespace {

constexpr int64_t kSegmentAlignBytes =
    64;                                // at 4 bytes off, vectorised kernels of the framework give other bits
constexpr int64_t kBlockBytes = 4096;  // transfers to the store are whole blocks
constexpr int64_t kElementsMax = int64_t{1} << 48;

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
  const bool fits = spec.format == Format::frozen ||
                    (spec.format == Format::bf16_split && spec.dtype == "BF16") ||
                    (spec.format == Format::fp32 && spec.dtype == "F32");
  if (!fits) {
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
  for (Component c : {Component::lo, Component::m, Component::v}) {
    if (unit.component_bytes(c) > 0) narrowest = std::min(narrowest, unit.component_bytes(c));
  }
  return kBlockBytes / narrowest;
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
  unit.dtype = spec.dtype;
  unit.element_bytes = dtype_bytes(spec.dtype);
  const int64_t align = std::max<int64_t>(1, kSegmentAlignBytes / unit.element_bytes);
  int64_t end = 0;
  for (const SegmentSpec& segment : spec.segments) {
    if (!names.insert(segment.name).second) {
      throw std::invalid_argument(fmt::format("parameter {} is declared twice", segment.name));
    }
    const int64_t elements = count_elements(segment);
    unit.segments.push_back(
        {segment.name, segment.aliases, segment.shape, strides_of(segment), segment.group, end, elements});
    end = round_up(end + elements, align);
  }
  unit.elements = std::max<int64_t>(end, align);
  return unit;
}

}  // namespace

std::string_view format_name(Format format) {
  switch (format) {
    case Format::bf16_split:
      return "bf16_split";
    case Format::fp32:
      return "fp32";
    case Format::frozen:
      return "frozen";
  }
  return "?";
}

Format format_from_name(std::string_view name) {
  for (Format format : {Format::bf16_split, Format::fp32, Format::frozen}) {
    if (name == format_name(format)) return format;
  }
  throw std::invalid_argument(fmt::format("unknown format '{}': one of bf16_split, fp32, frozen", name));
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

const char* component_name(Component component) {
  switch (component) {
    case Component::hi:
      return "hi";
    case Component::lo:
      return "lo";
    case Component::m:
      return "m";
    case Component::v:
      return "v";
  }
  return "?";
}

bool Chunk::has_any(const std::vector<uint8_t>& marked) const {
  return std::any_of(runs.begin(), runs.end(), [&](const Run& run) { return marked[run.segment] != 0; });
}

int64_t Unit::component_bytes(Component component) const {
  switch (component) {
    case Component::hi:
      return element_bytes;
    case Component::lo:
      return format == Format::bf16_split ? 2 : 0;
    case Component::m:
    case Component::v:
      return trainable() ? 4 : 0;
  }
  return 0;
}

int64_t Unit::state_bytes() const {
  return component_bytes(Component::lo) + component_bytes(Component::m) + component_bytes(Component::v);
}

Layout make_layout(const std::vector<UnitSpec>& specs, int64_t chunk_elements, int rank, int world) {
  if (specs.empty()) throw std::invalid_argument("a model needs at least one unit");
  if (chunk_elements <= 0) throw std::invalid_argument("chunk_elements must be positive");
  Layout layout;
  layout.rank = rank;
  layout.world = world;
  std::unordered_set<std::string> names;
  for (const UnitSpec& spec : specs) {
    Unit unit = place_segments(spec, names);
    const int64_t granule = granule_of(unit);
    unit.elements = round_up(unit.elements, granule * world);
    unit.shard_elements = unit.elements / world;
    // Equal pieces, so that the ring's slots (sized by the largest) are filled.
    const int64_t pieces = (unit.shard_elements + chunk_elements - 1) / chunk_elements;
    const int64_t piece = round_up((unit.shard_elements + pieces - 1) / pieces, granule);
    unit.first_chunk = static_cast<int32_t>(layout.chunks.size());
    const auto index = static_cast<int32_t>(layout.units.size());
    for (int64_t begin = 0; begin < unit.shard_elements; begin += piece) {
      const int64_t elements = std::min(piece, unit.shard_elements - begin);
      layout.chunks.push_back(
          {index, begin, elements, runs_of(unit, rank * unit.shard_elements + begin, elements)});
    }
    unit.chunk_count = static_cast<int32_t>(layout.chunks.size()) - unit.first_chunk;
    layout.units.push_back(std::move(unit));
  }
  return layout;
}

}  // namespace overspill::engine
