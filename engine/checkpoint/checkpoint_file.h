// Plain files of checkpoint folders: every failure is a CheckpointError naming file, offset and cause; no
// symbolic link is followed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "engine/checkpoint/manifest.h"

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
  void read_at(std::span<std::byte> to, int64_t offset) const;  // all of it, or an error
  void write(std::span<const std::byte> from);                  // behind what was written
  void sync();

 private:
  CheckpointFile(std::filesystem::path path, int file) : path_(std::move(path)), file_(file) {}

  std::filesystem::path path_;
  int file_ = -1;
};

/// One that is there already will do.
void make_folder(const std::filesystem::path& folder);

/// Makes what was created and renamed in a folder durable.
void sync_folder(const std::filesystem::path& folder);

/// Also replaces what has the new name.
void rename_file(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace overspill::engine
