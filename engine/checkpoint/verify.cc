// Whether a checkpoint is whole: every byte that its manifest names, against the checksums written with it.
#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include "engine/checkpoint/checkpoint_reader.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/side_by_side.h"
#include "io/checksum.h"

namespace overspill::engine {
namespace {

constexpr int64_t kVerifyBytes = 64 * io::kChecksumBlockBytes;  // whole blocks: none is read twice
constexpr int kVerifyThreads = 8;                               // as many requests are in flight

std::set<std::string_view> files_of(const Manifest& manifest) {
  std::set<std::string_view> files;
  for (const ManifestUnit& unit : manifest.units) {
    for (const ManifestPiece& piece : unit.pieces) files.insert(piece.range.file);
  }
  return files;
}

struct VerifiedRun {
  const FileRange* range;
  int64_t begin;
  int64_t bytes;
};

}  // namespace

void verify_ranges(const CheckpointReader& files, std::span<const FileRange* const> ranges,
                   const std::function<void(int64_t)>& report) {
  std::vector<VerifiedRun> runs;
  for (const FileRange* range : ranges) {
    for (int64_t begin = 0; begin < range->bytes; begin += kVerifyBytes)
      runs.push_back({range, begin, std::min(kVerifyBytes, range->bytes - begin)});
  }
  std::vector<io::PageBuffer> buffers(kVerifyThreads);
  side_by_side(
      std::ssize(runs), kVerifyThreads,
      [&](int worker, int64_t item) {
        const VerifiedRun& run = runs[static_cast<size_t>(item)];
        files.read(*run.range, run.begin, run.bytes, buffers[static_cast<size_t>(worker)]);
        return run.bytes;
      },
      report);
}

VerifyResult verify_data(const CheckpointReader& files, const Manifest& manifest,
                         void (*progress)(void*, int64_t, int64_t), void* context) {
  VerifyResult result{.step = manifest.step, .files = std::ssize(files_of(manifest))};
  std::vector<const FileRange*> ranges;
  for (const ManifestUnit& unit : manifest.units) {
    result.parameters += static_cast<int64_t>(unit.segments.size());
    for (const ManifestPiece& piece : unit.pieces) {
      result.bytes += piece.range.bytes;
      ranges.push_back(&piece.range);
    }
  }
  verify_ranges(files, ranges, [&](int64_t done) {
    if (progress != nullptr) progress(context, done, result.bytes);
  });
  return result;
}

// Right after a save memory has what the disk may not.
VerifyResult verify_checkpoint(const std::filesystem::path& folder, void (*progress)(void*, int64_t, int64_t),
                               void* context) {
  const Manifest manifest = read_manifest(folder);
  for (const std::string_view file : files_of(manifest))
    CheckpointFile::open(path_of(folder, file)).drop_cached();
  return verify_data(CheckpointReader(folder), manifest, progress, context);
}

}  // namespace overspill::engine
