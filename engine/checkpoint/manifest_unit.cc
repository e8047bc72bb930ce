#include "engine/checkpoint/manifest_unit.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>

#include "engine/checkpoint/index_file.h"
#include "io/checksum.h"

namespace overspill::engine {
namespace {

namespace fs = std::filesystem;

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("({})", fmt::join(shape, ", "));
}

std::string strides_text(const std::vector<int64_t>& strides) {
  return strides.empty() ? "row-major ones" : shape_text(strides);
}

/// Throws unless the checkpoint's unit is held as this model's is.
void match_kind(const fs::path& folder, const ManifestUnit& found, const Unit& own) {
  const auto refuse = [&](const char* what, std::string_view there, std::string_view here) {
    throw CheckpointError(
        fmt::format("{} cannot be opened here: the {} of unit {} is {} there, {} here. Open it with the "
                    "settings it was made with",
                    folder.string(), what, own.name, there, here));
  };
  if (found.dtype != own.dtype) refuse("dtype", found.dtype, own.dtype);
  if (found.format != format_name(own.format)) refuse("format", found.format, format_name(own.format));
  const std::string_view optimizer = own.trainable() ? optim::name(own.optimizer) : "";
  if (found.optimizer != optimizer) refuse("optimizer", found.optimizer, optimizer);
}

}  // namespace

ManifestUnit describe(const Unit& unit, std::span<const int64_t> steps) {
  ManifestUnit out;
  out.name = unit.name;
  out.format = format_name(unit.format);
  if (unit.trainable()) out.optimizer = optim::name(unit.optimizer);
  for (const Component component : kAllComponents) {
    if (unit.has(component)) out.components.emplace_back(unit.component_name(component));
  }
  out.dtype = unit.dtype;
  out.elements = unit.elements;
  for (size_t s = 0; s < unit.segments.size(); ++s) {
    const Segment& segment = unit.segments[s];
    out.segments.push_back({segment.name, segment.aliases, segment.shape, segment.strides, segment.begin,
                            segment.elements, steps[s], segment.group, unit.trainable()});
  }
  return out;
}

void match(const fs::path& folder, const ManifestUnit& found, const Unit& own) {
  const auto refuse = [&](const std::string& what) {
    throw CheckpointError(
        fmt::format("{} is a checkpoint of another model: {}. Open it with the model it was made from",
                    folder.string(), what));
  };
  match_kind(folder, found, own);
  if (found.segments.size() != own.segments.size()) {
    refuse(fmt::format("unit {} has {} parameters there, {} here", own.name, found.segments.size(),
                       own.segments.size()));
  }
  for (size_t s = 0; s < own.segments.size(); ++s) {
    const ManifestSegment& there = found.segments[s];
    const Segment& here = own.segments[s];
    if (there.name != here.name)
      refuse(fmt::format("parameter {} is called {} there", here.name, there.name));
    if (there.shape != here.shape) {
      refuse(fmt::format("{} has shape {} there, {} here", here.name, shape_text(there.shape),
                         shape_text(here.shape)));
    }
    if (there.strides != here.strides) {
      refuse(fmt::format("{} has strides {} there, {} here", here.name, strides_text(there.strides),
                         strides_text(here.strides)));
    }
    if (there.begin != here.begin)
      refuse(fmt::format("{} begins at {} there, at {} here", here.name, there.begin, here.begin));
  }
}

int64_t manifest_bytes(const Setup& setup) {
  constexpr int64_t kLongest = std::numeric_limits<int64_t>::max();
  const Layout& layout = setup.layout;
  Manifest manifest;
  manifest.step = manifest.skipped_steps = kLongest;
  manifest.world = layout.slices;
  for (const Unit& unit : layout.units)
    manifest.units.push_back(describe(unit, std::vector<int64_t>(unit.segments.size(), kLongest)));
  for (int64_t shard = 0; shard < layout.shards; ++shard)
    manifest.indexes.push_back(
        {fmt::format("rank{}-{}", shard, kIndexFile), kLongest, 0, {shard, layout.shards}});
  return std::ssize(manifest_text(manifest));
}

int64_t index_bytes(const Setup& setup) {
  const Layout& layout = setup.layout;
  int64_t pieces = 0, checksums = 0;
  for (const Unit& unit : layout.units) {
    for (const Component component : kAllComponents) {
      if (!unit.has(component)) continue;
      pieces += unit.chunk_count;
      for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c)
        checksums += io::checksum_blocks(setup.component_bytes(c, component));
    }
  }
  return index_bytes(pieces, checksums);
}

}  // namespace overspill::engine
