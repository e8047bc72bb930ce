// A job's folder on one path: the lock that keeps two runs apart, the slab files, and what a dead run left.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "io/direct_alignment.h"
#include "io/files.h"
#include "io/unique_fd.h"

namespace overspill::io {

class StallWatch;

/// Names of slabs begin so, in the job's folder and in checkpoints.
inline constexpr std::string_view kSlabPrefix = "slab-";

/// A slab file; `fd` is O_DIRECT if the folder's direct() says so.
struct SlabFile {
  std::filesystem::path path;
  UniqueFd fd;
  int64_t bytes = 0;
  FileId id = {};
  // After a failed fdatasync a later one says nothing about the bytes before (the kernel may have dropped
  // them): set by the export, which from then on copies what it can verify.
  mutable bool sync_failed = false;
};

class JobFolder {
 public:
  /// Locks `<path>/overspill-<job>`; removes what dead runs of this user, of this job or another, left on the
  /// path. A live run's files are never touched, nor is another user's folder, nor one whose run may live on
  /// another machine. The path is made absolute first. Throws StoreError.
  JobFolder(const std::filesystem::path& path, const std::string& job, bool direct);
  JobFolder(JobFolder&&) = default;
  /// Removes the slabs, the lock and the folder, in the process that made them.
  ~JobFolder();

  /// A slab file whose space is taken on disk. Throws and leaves nothing behind. `wanted_bytes` is what
  /// the caller wants in all, for the message. Where the file system has no call that takes space, zeros are
  /// written, which takes as long as writing does and is said on stderr. `watch` sees the call that takes
  /// space; null: nothing does.
  SlabFile create_slab(uint32_t number, int64_t bytes, int64_t wanted_bytes, StallWatch* watch = nullptr);

  /// A slab that an earlier run left in a checkpoint, as slab `number` of this one: another link to the file
  /// `id`, which has the name `outside` there and `names` names so far. Throws StoreError, and leaves
  /// nothing, where the file cannot be linked here, has names that the caller does not know, or lacks room
  /// for what may be written to it. Its content stays as it is.
  SlabFile link_slab(uint32_t number, const std::filesystem::path& outside, const FileId& id, int64_t names,
                     StallWatch* watch = nullptr);

  /// Bytes this user may still take here.
  int64_t available_bytes() const;
  bool direct() const { return direct_; }
  /// Why O_DIRECT was asked for and is not used; "" otherwise.
  const std::string& direct_refusal() const { return direct_refusal_; }
  /// What the kernel asks of O_DIRECT here, where it tells.
  const std::optional<DirectAlignment>& direct_alignment() const { return alignment_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  void open_or_make();
  void take_lock(const std::string& job);
  void require_dead(const std::string& job, int lock) const;
  void try_direct();

  std::filesystem::path path_;
  UniqueFd base_;    // what path_ lies in
  UniqueFd folder_;  // path_
  UniqueFd lock_;
  pid_t owner_;
  bool direct_;
  std::string direct_refusal_;
  std::optional<DirectAlignment> alignment_;
};

}  // namespace overspill::io
