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

/// Copies what the manifest of `from` names, and nothing else of its files, into `to`, a folder of the
/// caller's; then writes a manifest there. Bytes are compared with their checksums on the way. All room is
/// taken before the first byte is written. What a copy that was cut off left in `to` is read, and where it
/// fits its checksums it stays: so the next copy goes on. Any manifest in `to` is removed first.
///
/// Memory: a few MiB. Throws CheckpointError; then `to` has no manifest, and all that the next copy may use.
/// `progress` as in merge_checkpoint.
CopyResult copy_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                           void (*progress)(void*, int64_t, int64_t), void* context);

}  // namespace overspill::engine
