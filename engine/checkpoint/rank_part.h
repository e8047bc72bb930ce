// What one rank puts into a checkpoint: its extents, linked or copied, what lies in host memory, and the
// index of both. The snapshot (states/snapshot.h) says when each chunk is taken.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/resident_file.h"
#include "engine/core/core.h"
#include "engine/core/model_states.h"
#include "engine/plan/setup.h"
#include "engine/states/snapshot.h"
#include "engine/weights/access.h"
#include "io/store.h"

namespace overspill::engine {

/// How far a save is, for any thread.
struct SaveMeter {
  std::atomic<int64_t> bytes = 0;    // of this rank's part
  std::atomic<int64_t> written = 0;  // of these, without what is being copied
  io::ExportPace pace;               // and what is

  int64_t done() const { return std::min<int64_t>(bytes, written + pace.copied_bytes); }
};

class RankPart final : public Snapshot::Taker {
 public:
  /// `folder` is this rank's own. Nothing is written before write() has something to write.
  RankPart(const Setup& setup, Core& core, ModelStates& model, Access& access, SaveMeter& meter,
           const std::filesystem::path& folder);
  RankPart(const RankPart&) = delete;
  RankPart& operator=(const RankPart&) = delete;

  /// Whether this rank writes any pieces. At stage 0 every rank holds all, and one of them writes it.
  bool has_pieces() const { return setup_.layout.shards > 1 || setup_.layout.slice == 0; }

  void pin(int32_t chunk) REQUIRES(engine_mutex) override;
  void write(int32_t chunk) EXCLUDES(engine_mutex) override;

  /// When all chunks are taken: makes everything durable. Returns the units with this rank's pieces; without
  /// any where another rank writes them (stage 0). Throws io::StoreError.
  std::vector<ManifestUnit> finish();

  struct Pinned {
    std::optional<uint64_t> share;      // of the slabs that were linked in the folder
    std::vector<uint64_t> part_shares;  // and in its parts on other file systems
    std::vector<io::Extent> extents;
  };
  /// Hands over what is pinned: what pin() has pinned, but for what finish() has copied. The caller unpins
  /// it.
  Pinned give_pins();

 private:
  struct Piece {
    io::Extent extent;  // empty: `range` is in the file of what was in host memory
    FileRange range;
  };
  using Pieces = std::array<Piece, kComponents>;

  Piece& piece(int32_t chunk, Component component) {
    return pieces_[static_cast<size_t>(chunk)][static_cast<size_t>(component)];
  }
  void export_extents();
  FileRange zeros(int64_t bytes);

  const Setup& setup_;
  Core& core_;
  ModelStates& model_;
  Access& access_;
  SaveMeter& meter_;
  const std::filesystem::path folder_;
  ResidentFile resident_;
  std::vector<Pieces> pieces_;               // by chunk; each is written by whoever takes the chunk
  std::vector<std::vector<int64_t>> steps_;  // by unit and segment
  Pinned pinned_;
};

}  // namespace overspill::engine
