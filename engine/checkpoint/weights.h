// Weights of a checkpoint, converted to a dtype of safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/manifest.h"

namespace overspill::engine {

/// The safetensors dtype that a unit's weights have after a merge to `wanted` ("BF16" or "F32"). Integers,
/// bool, F8 and F64 stay: converting them would change what a quantised or counting tensor means.
std::string merged_dtype(const ManifestUnit& unit, const std::string& wanted);

/// Reads runs of a unit's flat space, wherever its pieces lie. The manifest was checked, and outlives this.
class WeightReader {
 public:
  WeightReader(const std::filesystem::path& folder, const ManifestUnit& unit);

  /// Elements [begin, begin + count) in the format `dtype`, one that merged_dtype gave. Every byte is
  /// verified. Valid until the next call.
  std::span<const std::byte> read(int64_t begin, int64_t count, const std::string& dtype);

 private:
  void gather(std::string_view component, int64_t begin, int64_t count, std::vector<std::byte>& to) const;
  void to_float(int64_t count);
  void to_bf16(int64_t count);

  const std::filesystem::path& folder_;
  const ManifestUnit& unit_;
  std::map<std::string, std::map<int64_t, const ManifestPiece*>, std::less<>>
      pieces_;  // component -> begin -> piece
  std::vector<std::byte> hi_, lo_;
  std::vector<float> floats_;
  std::vector<uint16_t> halves_;
};

}  // namespace overspill::engine
