// A model's units as a manifest names them: described for a save, compared before a load, and how much text
// they take.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "engine/checkpoint/manifest.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

/// Describes a unit, without its pieces; `steps`: updates so far, by segment.
ManifestUnit describe(const Unit& unit, std::span<const int64_t> steps);

/// Throws CheckpointError, which names both sides, unless the unit that `folder` has is this model's, held as
/// this model holds it.
void match(const std::filesystem::path& folder, const ManifestUnit& found, const Unit& own);

/// The most bytes that the text of a manifest can have, without the caller's own text.
int64_t manifest_bytes(const Setup& setup);
/// Of this rank's index, without the names of its files.
int64_t index_bytes(const Setup& setup);

}  // namespace overspill::engine
