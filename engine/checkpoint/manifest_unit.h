// A model's units as a manifest names them: described for a save, compared before a load, and how much text
// they take.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "engine/checkpoint/manifest.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

/// All of a unit but its pieces; `steps` are its updates so far, by segment.
ManifestUnit describe(const Unit& unit, std::span<const int64_t> steps);

/// Throws CheckpointError, which names both sides, unless the unit that `folder` has is this model's, held as
/// this model holds it.
void match(const std::filesystem::path& folder, const ManifestUnit& found, const Unit& own);

enum class Bound : uint8_t { least, most };

/// What the manifest of all ranks has at least, or at most, beside the caller's own text. Offsets and counts
/// of steps are known when it is written; until then they have one digit, or as many as they can have.
int64_t manifest_bytes(const Setup& setup, Bound bound);

}  // namespace overspill::engine
