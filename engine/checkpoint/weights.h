// Weights of a checkpoint, converted to a dtype of safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/checkpoint_reader.h"
#include "engine/checkpoint/manifest.h"
#include "io/page_buffer.h"

namespace overspill::engine {

/// The safetensors dtype that a unit's weights have after a merge to `wanted` ("BF16" or "F32"). Integers,
/// bool, F8 and F64 stay: converting them would change what a quantised or counting tensor means.
std::string merged_dtype(const ManifestUnit& unit, const std::string& wanted);

/// Reads runs of a unit's flat space, wherever its pieces lie. The manifest was checked; it and the files
/// outlive this.
class WeightReader {
 public:
  WeightReader(const CheckpointReader& files, const ManifestUnit& unit) : files_(files) { turn_to(unit); }

  /// Reads another unit from now on, into the same memory.
  void turn_to(const ManifestUnit& unit);

  /// Elements [begin, begin + count) in the format `dtype`, one that merged_dtype gave. Every byte is
  /// verified. Valid until the next call.
  std::span<const std::byte> read(int64_t begin, int64_t count, const std::string& dtype);

 private:
  /// Elements of one component, in the buffer or, where several pieces have them, joined.
  struct Run {
    io::PageBuffer buffer;
    std::vector<std::byte> joined;
    std::span<const std::byte> bytes;
  };

  void gather(std::string_view component, int64_t begin, int64_t count, Run& run) const;
  void to_float(int64_t count);
  template <typename Join>
  void join(int64_t count, Join value);
  void to_bf16(int64_t count);

  const CheckpointReader& files_;
  const ManifestUnit* unit_ = nullptr;
  std::map<std::string, std::map<int64_t, const ManifestPiece*>, std::less<>>
      pieces_;  // component -> begin -> piece
  Run hi_, lo_;
  std::vector<float> floats_;
  std::vector<uint16_t> halves_;
};

}  // namespace overspill::engine
