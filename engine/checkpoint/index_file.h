// The binary part of a manifest: where the pieces of one rank's shard lie, with the checksum of every 64 KiB
// block. Each rank writes its own, so that a manifest stays small and a reader opens what it needs.
//
// Layout, all numbers little-endian: the header, then `files` names (a uint16 length, then the bytes), zeros
// up to a multiple of 8, `pieces` records of 48 bytes, and the uint64 checksums (XXH3-64) of all pieces, in
// their order. The manifest has the file's length and its XXH3-64.
#pragma once

#include <cstdint>
#include <filesystem>

#include "engine/checkpoint/manifest.h"

namespace overspill::engine {

inline constexpr const char* kIndexFile = "index.bin";                // behind a rank's prefix
inline constexpr int64_t kIndexBytesMax = int64_t{1} << 30;           // of states of about 8 TB
inline constexpr const char* kUnfinishedIndexFile = "index.bin.tmp";  // until it is durable

/// Writes the pieces of `units` durably, under a temporary name that is replaced at the end: a file with the
/// name `file` is whole. Throws CheckpointError, then there is none; `bytes_max` is what readers take.
IndexFile write_index(const std::filesystem::path& folder, const std::string& file,
                      const std::vector<ManifestUnit>& units, const UnitShard& shard,
                      int64_t bytes_max = kIndexBytesMax, io::StallWatch* watch = nullptr);

/// Adds the pieces to the units of the manifest. The file is untrusted: its checksum is compared first, and
/// every count before memory is taken for it. What the pieces mean is checked by check_pieces(). Throws
/// CheckpointError.
void read_index(const std::filesystem::path& folder, const IndexFile& index, Manifest& to);

/// The bytes of an index of so many pieces and checksums, without the names of its files.
int64_t index_bytes(int64_t pieces, int64_t checksums);

}  // namespace overspill::engine
