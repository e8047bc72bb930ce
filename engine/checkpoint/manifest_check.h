// What makes a manifest one that may be used. The same checks before a manifest is written and after it was
// read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "engine/checkpoint/manifest.h"
#include "engine/partition/model.h"

namespace overspill::engine {

/// The components that a unit's format has; empty for an unknown format.
std::span<const std::string_view> components_of(std::string_view format);

/// Bytes of one element of a component of a unit; 0 where the unit has no such component.
int64_t component_bytes(const ManifestUnit& unit, std::string_view component);

/// Throws CheckpointError naming the manifest, the part that is wrong and the values that decided it.
void check_manifest(const std::filesystem::path& folder, const Manifest& manifest);

}  // namespace overspill::engine
