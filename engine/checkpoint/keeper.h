// Takes and opens checkpoints of one engine (DESIGN 7): what lies on NVMe is pinned and linked, not copied;
// what lies on the host is written out.
//
// The updater is quiescent meanwhile. A checkpoint is made under "<folder>.partial" and renamed when it is
// complete and durable, so the folder is there whole or not at all. Its extents stay pinned as long as the
// folder's manifest exists somewhere: an open descriptor tells, also after the folder was moved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

#include "engine/access.h"
#include "engine/checkpoint/manifest.h"
#include "engine/schedule/context.h"

namespace overspill::engine {

class CheckpointKeeper {
 public:
  CheckpointKeeper(Context& context, Access& access) : context_(context), access_(access) {}
  CheckpointKeeper(const CheckpointKeeper&) = delete;
  CheckpointKeeper& operator=(const CheckpointKeeper&) = delete;
  ~CheckpointKeeper();

  // A save, in order (engine/save.cc, docs/store.md). Each throws CheckpointError when the folder holds
  // something, io::StoreError when the disk fails or is full.

  /// One rank: makes the folder under its temporary name.
  void prepare(const std::filesystem::path& folder) const;
  /// Every rank: pins its extents, writes its data durably, and says what it wrote.
  Manifest write_part(const std::filesystem::path& folder);
  /// One rank, when all have written theirs: the manifest, then the folder's name.
  void complete(const std::filesystem::path& folder, const Manifest& manifest) const;
  /// Every rank: the pins last as long as the folder.
  void keep(const std::filesystem::path& folder);
  /// Instead: one rank removes what was written, then every rank its pins. In this order: until the folder is
  /// gone its slabs are its own.
  void remove(const std::filesystem::path& folder) const noexcept;
  void give_up() noexcept;

  /// Throws CheckpointError where new versions of the states have no room beside a checkpoint of this run
  /// (Config::train_after_save).
  void require_room_to_change();

  /// The manifest fits this model, and every byte that this rank would take fits its checksum. Throws
  /// CheckpointError naming what does not.
  Manifest verify(const std::filesystem::path& folder) const;

  /// Brings this rank's part of a verified checkpoint's weights and states home, and the step counts.
  void load(const std::filesystem::path& folder, const Manifest& manifest);

 private:
  struct Kept {
    int manifest_fd = -1;
    std::vector<io::Extent> extents;
  };

  /// What of a piece is this rank's, in elements.
  struct Overlap {
    int64_t in_shard;
    int64_t in_piece;
    int64_t elements;  // 0 or less: nothing
  };

  void forget_deleted();
  Overlap overlap(const Unit& own, const ManifestPiece& piece) const;
  Manifest own_part(const Manifest& manifest) const;
  int32_t index_of(const std::string& unit) const;
  std::vector<io::Extent> pin_all();
  void unpin(const std::vector<io::Extent>& extents) noexcept;
  Manifest write_folder(const std::filesystem::path& folder, const std::vector<io::Extent>& extents) const;

  Context& context_;
  Access& access_;
  std::vector<Kept> kept_;
  std::vector<io::Extent> pinned_;  // of the save under way
};

}  // namespace overspill::engine
