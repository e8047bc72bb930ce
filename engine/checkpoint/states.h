// Optimizer states of a checkpoint, as fp32.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "cpu_optim/format.h"
#include "engine/checkpoint/checkpoint_reader.h"
#include "engine/checkpoint/manifest.h"
#include "io/page_buffer.h"

namespace overspill::engine {

/// Reads runs of one state of a unit, wherever its pieces lie. The manifest was checked; it and the files
/// outlive this.
class StateReader {
 public:
  /// `state`: the core's name of it, as the unit's components have it. Throws CheckpointError where the unit
  /// has no such state.
  StateReader(const CheckpointReader& files, const ManifestUnit& unit, std::string_view state);

  /// Elements from `begin` of the unit's flat space on, exactly as the engine would read them in the unit's
  /// format. Every byte read is verified.
  void read(int64_t begin, std::span<float> values);

 private:
  void decode(const ManifestPiece& piece, int64_t first, std::span<float> values);

  const CheckpointReader& files_;
  const ManifestUnit& unit_;
  const optim::ComponentSpec* spec_ = nullptr;
  std::map<int64_t, const ManifestPiece*> pieces_;  // by their first element
  std::vector<std::byte> bytes_;
  io::PageBuffer buffer_;
};

}  // namespace overspill::engine
