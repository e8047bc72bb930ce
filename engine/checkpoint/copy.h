// A checkpoint's weights and states in another folder, on any file system.
#pragma once

#include <cstdint>
#include <filesystem>

#include "engine/checkpoint/manifest.h"

namespace overspill::engine {

struct CopyResult {
  int64_t files = 0;
  int64_t bytes = 0;
  int64_t kept = 0;  // of these, bytes that an earlier copy had left, which fit their checksums
};

/// Copies the byte ranges that the manifest of `from` names into `to`, a folder of the caller's, then writes
/// a manifest there. All bytes are compared with their checksums, and disk space is allocated before the
/// first is written. Ranges that an interrupted copy left in `to` are kept where they fit their checksums.
/// Any manifest in `to` is removed first.
///
/// Memory: a few MiB. Throws CheckpointError; then `to` has no manifest, and keeps what the next copy can
/// reuse. `progress` as in merge_checkpoint.
CopyResult copy_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                           void (*progress)(void*, int64_t, int64_t), void* context);

}  // namespace overspill::engine
