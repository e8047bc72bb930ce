// Takes and opens checkpoints of one engine (docs/store.md). Extents on NVMe are pinned and their slab files
// hard-linked, not copied; components on the host are written out.
//
// The updater is quiescent meanwhile. A checkpoint is made under "<folder>.partial" and renamed when it is
// complete and durable, so the folder is there whole or not at all. Extents that it shares with the store
// stay pinned as long as the folder has their slabs (io::Store::share_lives); extents that it copied are not
// pinned.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/checkpoint_reader.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/rank_part.h"
#include "engine/checkpoint/restore.h"
#include "engine/core/core.h"
#include "engine/core/model_states.h"
#include "engine/plan/setup.h"
#include "engine/weights/access.h"
#include "io/unique_fd.h"

namespace overspill::engine {

/// What a rank has written.
struct WrittenPart {
  std::vector<ManifestUnit> units;  // without pieces
  std::optional<IndexFile> index;   // nothing where another rank writes all pieces (stage 0)
};

class CheckpointKeeper {
 public:
  /// Warns on stderr, on one rank, if a checkpoint of this model will or may be too large to save
  /// (Config::manifest_bytes_max).
  CheckpointKeeper(const Setup& setup, Core& core, ModelStates& model, Access& access);
  CheckpointKeeper(const CheckpointKeeper&) = delete;
  CheckpointKeeper& operator=(const CheckpointKeeper&) = delete;

  /// Once, before anything is stored: takes the room that the plan wants on NVMe, which is that of
  /// Config::take_over's checkpoints first. Throws io::StoreError.
  void take_room();

  // A save, in order (engine/calls/save.cc, docs/store.md). Each throws CheckpointError when the folder holds
  // something, io::StoreError when the disk fails or is full.

  /// One rank: makes the folder under its temporary name, and holds it until complete() or give_up(): another
  /// process that saves there is refused.
  void prepare(const std::filesystem::path& folder);
  /// Where a save of `folder` writes until it is complete.
  static std::filesystem::path unfinished(const std::filesystem::path& folder);
  /// Every rank: takes room for new versions of the states, and makes the part that a snapshot is taken into.
  RankPart& begin_part(const std::filesystem::path& folder) EXCLUDES(engine_mutex);
  /// Every rank, when all chunks are taken: makes its part durable, and says what it wrote.
  WrittenPart finish_part(const std::filesystem::path& folder) EXCLUDES(engine_mutex);
  /// Copies leave the disks to training for most of the time, until hurry(). Any thread.
  void take_time() { meter_.pace.leisurely = true; }
  void hurry() { meter_.pace.leisurely = false; }
  const SaveMeter& meter() const { return meter_; }
  /// One rank, when all have written their parts: writes the manifest, then gives the folder its name.
  void complete(const std::filesystem::path& folder, const Manifest& manifest);
  /// Every rank: keeps the pins for as long as the folder has its slabs.
  void keep(const std::filesystem::path& folder) EXCLUDES(engine_mutex);
  /// If a save fails: one rank removes what was written, then every rank drops its pins. In this order, since
  /// the folder's slabs need the pins until it is gone.
  void remove(const std::filesystem::path& folder) const noexcept;
  void give_up() noexcept;
  /// If a save fails because the disk does not answer: leaves the folder as it is, and keeps the pins until
  /// somebody removes the folder.
  void leave();

  /// Throws CheckpointError where new versions of the states have no room beside a checkpoint of this run
  /// (Config::train_after_save).
  void require_room_to_change() EXCLUDES(engine_mutex);

  // A load, in order (engine/calls/load.cc). Each throws CheckpointError naming what is damaged, missing or
  // another model's.

  /// The manifest, which fits this model, with the pieces that this rank would load.
  Manifest open(const std::filesystem::path& folder) const;
  /// Checks that every byte this rank would load fits its checksum. They come from the page cache when load()
  /// reads them next.
  void verify(const std::filesystem::path& folder, const Manifest& manifest) const;
  enum class Loading { verified, unread };  // before load(): by verify(), or not
  /// Loads this rank's part: weights, states and step counts, each byte against its checksum. After an
  /// exception some are loaded.
  void load(const std::filesystem::path& folder, const Manifest& manifest, Loading loading)
      EXCLUDES(engine_mutex);

 private:
  /// The part of a manifest's piece that this rank holds, in elements.
  struct Overlap {
    int64_t in_shard;
    int64_t in_piece;
    int64_t elements;  // 0 or less: nothing
  };

  /// A piece that is all of a chunk's component, and lies in a slab of this run's store.
  struct TakenPiece {
    RestoredPiece piece;
    int32_t chunk = 0;
    Component component = {};
    io::Extent extent;
  };

  std::string too_large() const;
  std::string rank_name() const;
  void forget_deleted();
  Overlap overlap(const Unit& own, const ManifestPiece& piece) const;
  std::vector<size_t> needed(const Manifest& manifest) const;
  void drop_others(Manifest& manifest) const;
  int32_t index_of(const std::string& unit) const;
  int64_t pinned_bytes() const;
  int64_t room_bytes() const;
  std::optional<TakenPiece> taken_piece(const std::filesystem::path& folder,
                                        const RestoredPiece& piece) const;
  std::filesystem::path own_folder(const std::filesystem::path& folder) const;
  void move_up(const std::filesystem::path& partial, const std::string& prefix) const;
  RankPart::Pinned end_part();
  void unpin(const RankPart::Pinned& pinned) noexcept;
  void count_steps(int32_t unit, const ManifestUnit& found) EXCLUDES(engine_mutex);

  const Setup& setup_;
  Core& core_;
  ModelStates& model_;
  Access& access_;
  std::vector<RankPart::Pinned> kept_;
  SaveMeter meter_;               // of the last save
  std::optional<RankPart> part_;  // of the save under way
  io::UniqueFd saving_folder_;    // on the rank that prepared it: locked
};

}  // namespace overspill::engine
