// Reads pieces of a checkpoint into their places, each byte against its checksum.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/checkpoint/checkpoint_reader.h"
#include "engine/checkpoint/manifest.h"
#include "engine/plan/setup.h"
#include "engine/weights/access.h"

namespace overspill::engine {

/// The part of a manifest's piece that this rank holds, in elements.
struct RestoredPiece {
  int32_t unit = 0;  // of the layout
  const ManifestUnit* found = nullptr;
  const ManifestPiece* piece = nullptr;
  int64_t in_shard = 0;
  int64_t in_piece = 0;
  int64_t elements = 0;
};

/// Reads and verifies them by several threads. What is in memory is read into its place; what is not is
/// written one piece after the other, while the next are read. After an exception some of them are loaded.
/// report(bytes so far): on the calling thread.
void restore_pieces(const CheckpointReader& files, const Setup& setup, Access& access,
                    const std::vector<RestoredPiece>& pieces, const std::function<void(int64_t)>& report);

}  // namespace overspill::engine
