// Checks whether a manifest may be used: before it is written, and after it was read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "engine/partition/model.h"

namespace overspill::engine {

/// The components that a unit's optimizer has in its format, the weight first and its master, where there is
/// one, second; empty where one of the two is unknown.
std::vector<std::string_view> components_of(const ManifestUnit& unit);

/// Bytes of one element of a component of a unit, without scales; 0 where the unit has no such component.
int64_t component_element_bytes(const ManifestUnit& unit, std::string_view component);

/// Bytes of a piece of `elements`, scales included.
int64_t component_bytes(const ManifestUnit& unit, std::string_view component, int64_t elements);

// Each throws CheckpointError naming the manifest, the part that is wrong and the values that decided it.

/// All but the pieces.
void check_manifest_text(const std::filesystem::path& folder, const Manifest& manifest);
/// Whether the pieces are these shards of every unit, exactly once, and lie inside their files.
void check_pieces(const std::filesystem::path& folder, const Manifest& manifest,
                  std::span<const UnitShard> read);

}  // namespace overspill::engine
