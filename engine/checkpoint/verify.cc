// Whether a checkpoint is whole: every byte that its manifest names, against the checksums written with it.
#include <algorithm>
#include <set>
#include <string_view>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/manifest.h"
#include "io/checksum.h"

namespace overspill::engine {
namespace {

constexpr int64_t kRunBytes = 64 * io::kChecksumBlockBytes;  // whole blocks: none is read twice

std::set<std::string_view> files_of(const Manifest& manifest) {
  std::set<std::string_view> files;
  for (const ManifestUnit& unit : manifest.units) {
    for (const ManifestPiece& piece : unit.pieces) files.insert(piece.range.file);
  }
  return files;
}

}  // namespace

VerifyResult verify_data(const std::filesystem::path& folder, const Manifest& manifest,
                         void (*progress)(void*, int64_t, int64_t), void* context) {
  VerifyResult result{.step = manifest.step, .files = std::ssize(files_of(manifest))};
  int64_t total = 0;
  for (const ManifestUnit& unit : manifest.units) {
    result.parameters += static_cast<int64_t>(unit.segments.size());
    for (const ManifestPiece& piece : unit.pieces) total += piece.range.bytes;
  }
  std::vector<std::byte> buffer;
  for (const ManifestUnit& unit : manifest.units) {
    for (const ManifestPiece& piece : unit.pieces) {
      for (int64_t begin = 0; begin < piece.range.bytes; begin += kRunBytes) {
        buffer.resize(static_cast<size_t>(std::min(kRunBytes, piece.range.bytes - begin)));
        read_range_part(folder, piece.range, begin, buffer);
        result.bytes += static_cast<int64_t>(buffer.size());
        if (progress != nullptr) progress(context, result.bytes, total);
      }
    }
  }
  return result;
}

// Right after a save memory has what the disk may not.
VerifyResult verify_checkpoint(const std::filesystem::path& folder, void (*progress)(void*, int64_t, int64_t),
                               void* context) {
  const Manifest manifest = read_manifest(folder);
  for (const std::string_view file : files_of(manifest))
    CheckpointFile::open(path_of(folder, file)).drop_cached();
  return verify_data(folder, manifest, progress, context);
}

}  // namespace overspill::engine
