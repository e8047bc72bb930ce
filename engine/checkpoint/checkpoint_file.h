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

inline constexpr const char* kUseAnotherCheckpoint = "use another checkpoint, or restore this file";

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
  /// Reserves the disk's blocks for a file of so many bytes and gives it that length: writes by several
  /// threads then need no exclusive lock of the file. Where the file system refuses, for want of room too,
  /// nothing happens: the writes find out.
  void preallocate(int64_t bytes) const;
  void drop_cached() const;
  /// What is read and written from now on goes past the page cache (O_DIRECT), where the file system can:
  /// pages alone may be read and written then (read_pages, write_pages).
  void pass_cache() const;
  void read_at(std::span<std::byte> to, int64_t offset) const;  // all of it, or an error
  /// `to` and `offset` are whole pages (io::kBlockBytes), in memory too; at least `wanted` bytes are read, or
  /// it is an error: a file may end within its last page.
  void read_pages(std::span<std::byte> to, int64_t offset, int64_t wanted) const;
  void write(std::span<const std::byte> from);  // behind what was written
  /// The same for a write, at any place; several threads may write, each in pages of its own.
  void write_pages(std::span<const std::byte> from, int64_t offset) const;
  /// Ends the file there.
  void cut(int64_t bytes) const;
  /// `watch` sees it; null: nothing does. Throws io::StoreError{stalled} when the watch gives it up.
  void sync(io::StallWatch* watch = nullptr);

 private:
  CheckpointFile(std::filesystem::path path, int file) : path_(std::move(path)), file_(file) {}
  void use_cache() const;

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
