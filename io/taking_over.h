// A run that goes on from a checkpoint of its own disk goes on in that checkpoint's slabs: what the
// checkpoints there hold of them stays as it is, and the rest is the store's room again. So it needs no more
// of the disk than the run before (docs/store.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace overspill::io {

struct Extent;

/// A run of bytes that a checkpoint holds of a slab, with the checksums of its blocks, which are the
/// caller's.
struct KeptRange {
  std::string file;  // in the folder
  int64_t offset = 0;
  int64_t bytes = 0;
  std::span<const uint64_t> checksums;
};

/// All that a checkpoint, or a part of one (part_folder.h), has in slabs of one rank.
struct KeptSlabs {
  std::filesystem::path folder;
  std::string mark;  // the file that the export made in the folder (slab_share.h)
  std::vector<KeptRange> ranges;
};

struct TakenOver {
  struct Folder {
    std::optional<uint64_t> share;  // nothing: no slab of it was taken
    std::vector<Extent> extents;    // each written, pinned for this folder, and released
  };
  std::vector<Folder> folders;    // one for each KeptSlabs
  int64_t slab_bytes = 0;         // of the slabs that were taken
  std::vector<std::string> left;  // which slabs were not, and why
};

}  // namespace overspill::io
