// Tracks which checkpoint folders still share slabs with the store, so that the store knows when it may reuse
// their bytes.
//
// Each linked export has a mark of its own: a small file that lies in the job's folder and, by hard link, in
// the checkpoint's. The link counts of the mark and of the slabs are enough. They stay right when the folder
// is moved or copied with hard links (`cp -al`). And the store holds no file of the checkpoint open, which on
// NFS and FUSE would keep its folder from being removed.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "base/mutex.h"
#include "io/job_folder.h"
#include "io/unique_fd.h"

namespace overspill::io {

class StallWatch;

/// Names of marks in checkpoints begin so.
inline constexpr std::string_view kMarkPrefix = "shared-";

/// Threads: every method may be called from any thread.
class SlabShares {
 public:
  /// `watch` outlives it and sees what waits for the disk; null: nothing does.
  explicit SlabShares(StallWatch* watch = nullptr) : watch_(watch) {}

  /// Makes the mark of a new export in `folder` and in the folder of `slab`. Returns nothing if the two
  /// folders cannot share a file, or if the file system does not count links: then slabs must be copied.
  /// Throws StoreError; then nothing is left.
  std::optional<uint64_t> begin(const SlabFile& slab, const std::filesystem::path& folder,
                                const std::string& job);

  /// Takes up an export of a run that has ended: its mark `outside` gets a name in `own_folder` again. Throws
  /// StoreError where that cannot be, or where `outside` is no mark of this user's.
  uint64_t take_up(const std::filesystem::path& outside, const std::filesystem::path& own_folder);

  /// Another slab that was linked, under the name `outside`. It stays where it is until end().
  void add(uint64_t share, const SlabFile& slab, const std::filesystem::path& outside);

  /// The name of the mark in the checkpoint's folder.
  std::filesystem::path path(uint64_t share) const;

  /// As Store::share_named.
  void named(uint64_t share, const std::filesystem::path& folder, const std::string& prefix);

  /// Whether a name outside the job's folder may still lead to the slabs of this export. False only once the
  /// removal of those names is durable.
  bool alive(uint64_t share) const;

  /// Removes the mark's name in the job's folder. Its name in the checkpoint stays.
  void end(uint64_t share) noexcept;

 private:
  struct Share {
    std::filesystem::path own;      // the mark in the job's folder
    std::filesystem::path outside;  // its name in the checkpoint, unless that was moved
    UniqueFd mark;
    std::map<const SlabFile*, std::filesystem::path> slabs;  // with their names in the checkpoint, likewise

    int64_t names_of(const SlabFile& slab) const;
  };

  StallWatch* const watch_;
  mutable Mutex mutex_;
  std::map<uint64_t, Share> shares_ GUARDED_BY(mutex_);
  uint64_t last_ GUARDED_BY(mutex_) = 0;
};

}  // namespace overspill::io
