// The parameters of a checkpoint, each whole: its weight and its states, row-major.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "engine/checkpoint/checkpoint_reader.h"
#include "engine/checkpoint/manifest.h"

namespace overspill::engine {

/// Reads one parameter at a time into the caller's memory, in pieces of a few MiB, and verifies every byte.
/// Threads may share one.
class CheckpointParameters {
 public:
  /// Reads and checks the manifest. Throws CheckpointError.
  explicit CheckpointParameters(std::filesystem::path folder);
  CheckpointParameters(const CheckpointParameters&) = delete;
  CheckpointParameters& operator=(const CheckpointParameters&) = delete;

  const Manifest& manifest() const { return manifest_; }

  /// `dtype`: what `to` is filled with. That is the unit's own, or where it holds F16, BF16 or F32 also
  /// "BF16" or "F32", the exact master. Throws CheckpointError for a name that is not there and for damage,
  /// std::invalid_argument for another dtype and where `to` has another size.
  void read_weight(std::string_view parameter, const std::string& dtype, std::span<std::byte> to) const;

  /// `state`: the name of the unit's component that holds it, such as "m". Throws CheckpointError also where
  /// the unit has no such state.
  void read_state(std::string_view parameter, std::string_view state, std::span<float> to) const;

 private:
  struct Place {
    const ManifestUnit* unit;
    const ManifestSegment* segment;
  };

  Place place_of(std::string_view parameter) const;

  CheckpointReader files_;
  Manifest manifest_;
  std::map<std::string_view, Place> places_;  // into manifest_
};

}  // namespace overspill::engine
