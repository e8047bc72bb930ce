// Puts extents into a checkpoint folder, durably: slab files by hard link, or by copies of the extents where
// they cannot be linked (another file system, or one without hard links).
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "io/job_folder.h"
#include "io/slab_share.h"
#include "io/store.h"

namespace overspill::io {

class StallWatch;

/// An extent that is written and held, and the slab it lies in.
struct ExportItem {
  Extent extent;
  const SlabFile* slab = nullptr;
  std::span<const uint64_t> sums;
};

/// `watch` sees each fdatasync of a slab. Blocks until the bytes and the folder's entries are on the disk.
/// Throws StoreError and removes what it made. Copies are verified against the checksums. Results in the
/// order asked.
Export export_items(std::span<const ExportItem> items, const std::filesystem::path& folder,
                    const std::string& job, SlabShares& shares, ExportPace& pace,
                    StallWatch* watch = nullptr);

/// A file being filled with extents one after the other. Not durable before finish().
class ExtentFile {
 public:
  /// Creates `extents-<job>-<n>.bin` with the first free n, and takes its space on the disk: one that is too
  /// full is found before anything is copied. Throws StoreError and leaves nothing.
  ExtentFile(const std::filesystem::path& folder, const std::string& job, int64_t bytes_total);
  void append(std::span<const std::byte> bytes);
  /// At an offset that the caller chooses; any thread, several at once.
  void write(std::span<const std::byte> bytes, int64_t offset) const;
  /// Starts to bring what was written to the disk: not all of it waits for finish().
  void start_writing(int64_t offset, int64_t bytes) const noexcept;
  void finish(StallWatch* watch = nullptr);
  const std::filesystem::path& path() const { return path_; }
  int64_t bytes() const { return bytes_; }  // appended

 private:
  std::filesystem::path path_;
  UniqueFd fd_;
  int64_t bytes_ = 0;
};

}  // namespace overspill::io
