// Plain files of checkpoint folders: every failure is a CheckpointError naming file, offset and cause; no
// symbolic link is followed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

#include "engine/checkpoint/manifest.h"
#include "io/stall_watch.h"

namespace overspill::engine {

class CheckpointFile {
 public:
  /// Regular files only.
  static CheckpointFile open(const std::filesystem::path& path);
  /// A new file; one that is there already is an error. `mode` as for open(2).
  static CheckpointFile create(const std::filesystem::path& path, int mode);

  CheckpointFile(CheckpointFile&& other) noexcept;
  CheckpointFile& operator=(CheckpointFile&&) = delete;
  ~CheckpointFile();

  int64_t bytes() const;
  /// Asks the kernel to drop the file's cached pages that are on the disk, so that the next read comes from
  /// the disk. A file system may ignore this.
  void drop_cached() const;
  void read_at(std::span<std::byte> to, int64_t offset) const;  // all of it, or an error
  void write(std::span<const std::byte> from);                  // behind what was written
  /// `watch` sees it; null: nothing does. Throws io::StoreError{stalled} when the watch gives it up.
  void sync(io::StallWatch* watch = nullptr);

 private:
  CheckpointFile(std::filesystem::path path, int file) : path_(std::move(path)), file_(file) {}

  std::filesystem::path path_;
  int file_ = -1;
};

/// Whether a name in a manifest is of a file in a part of the checkpoint (io/part_folder.h): "<id>/<name>".
bool is_in_part(std::string_view file);
/// Where a file that a manifest names lies. Throws CheckpointError where the part that it lies in is not
/// there.
std::filesystem::path path_of(const std::filesystem::path& folder, std::string_view file);

/// Makes the folder, unless it exists.
void make_folder(const std::filesystem::path& folder);

/// Makes what was created and renamed in a folder durable. `watch`: as CheckpointFile::sync.
void sync_folder(const std::filesystem::path& folder, io::StallWatch* watch = nullptr);

/// Replaces a file that has the new name.
void rename_file(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace overspill::engine
