// Optimizer states of a checkpoint, as fp32.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "cpu_optim/format.h"
#include "engine/checkpoint/manifest.h"

namespace overspill::engine {

/// Reads runs of one state of a unit, wherever its pieces lie. The manifest was checked, and outlives this.
class StateReader {
 public:
  /// `state`: the core's name of it, as the unit's components have it. Throws CheckpointError where the unit
  /// has no such state.
  StateReader(const std::filesystem::path& folder, const ManifestUnit& unit, std::string_view state);

  /// Elements from `begin` of the unit's flat space on, exactly as the engine would read them in the unit's
  /// format. Every byte read is verified.
  void read(int64_t begin, std::span<float> values);

 private:
  void decode(const ManifestPiece& piece, int64_t first, std::span<float> values);

  const std::filesystem::path& folder_;
  const ManifestUnit& unit_;
  const optim::ComponentSpec* spec_ = nullptr;
  std::map<int64_t, const ManifestPiece*> pieces_;  // by their first element
  std::vector<std::byte> bytes_;
};

/// The parameters of a checkpoint, each with its states, read one at a time into the caller's memory.
class CheckpointParameters {
 public:
  /// Reads and checks the manifest. Throws CheckpointError.
  explicit CheckpointParameters(std::filesystem::path folder);

  const Manifest& manifest() const { return manifest_; }

  /// A weight in the order in which it lies in the engine's memory (ManifestSegment::strides). `wanted`:
  /// "F32", which gives the exact master, or "BF16"; what merged_dtype does not convert is given as it is.
  /// Throws CheckpointError for a name that is not there and for damage, std::invalid_argument where `to`
  /// has another size.
  void read_weight(std::string_view parameter, const std::string& wanted, std::span<std::byte> to) const;

  /// A state, in the same order.
  void read_state(std::string_view parameter, std::string_view state, std::span<float> to) const;

 private:
  struct Place {
    const ManifestUnit* unit;
    const ManifestSegment* segment;
  };

  Place place_of(std::string_view parameter) const;

  std::filesystem::path folder_;
  Manifest manifest_;
  std::map<std::string_view, Place> places_;
};

}  // namespace overspill::engine
