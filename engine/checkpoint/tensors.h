// The parameters of a checkpoint, each whole: its weight and its states, row-major.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/weights.h"

namespace overspill::engine {

/// Units and segments have the numbers of their places in the manifest. One thread at a time. Every byte is
/// verified; throws CheckpointError. Memory: what is read, and a few MiB.
class StoredTensors {
 public:
  explicit StoredTensors(const std::filesystem::path& folder);

  /// The weight in `dtype`, one that merged_dtype gives for "BF16" or "F32". `to` has exactly its bytes;
  /// throws std::invalid_argument otherwise, and for numbers that the manifest does not have.
  void read_weight(int64_t unit, int64_t segment, const std::string& dtype, std::span<std::byte> to);

  /// The state that `component` holds, such as "m", in fp32. Throws std::invalid_argument where the unit has
  /// no such state.
  void read_state(int64_t unit, int64_t segment, std::string_view component, std::span<float> to);

 private:
  const ManifestSegment& open(int64_t unit, int64_t segment, size_t bytes, int64_t element_bytes);

  std::filesystem::path folder_;
  Manifest manifest_;
  int64_t opened_ = -1;  // the unit of `reader_`
  std::unique_ptr<WeightReader> reader_;
};

}  // namespace overspill::engine
