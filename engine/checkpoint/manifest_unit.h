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

enum class Bound : uint8_t { least, most };

/// The least, or the most, bytes of the manifest of all ranks, without the caller's own text. Offsets and
/// step counts are unknown until it is written: they count with one digit, or with as many as they can have.
int64_t manifest_bytes(const Setup& setup, Bound bound);

}  // namespace overspill::engine
