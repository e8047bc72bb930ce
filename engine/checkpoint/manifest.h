// What a checkpoint folder holds: one JSON file, written last, that names the units and their parameters, and
// binary files that say where their pieces lie (index_file.h, docs/store.md). Untrusted when read: every
// size, offset and name is checked before use. Content is found by parameter name, so a checkpoint opens with
// any number of ranks and any placement. The text carries its own checksum.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace overspill::io {
class StallWatch;
}

namespace overspill::engine {

/// Read too: 3, whose text has the pieces and their checksums; 2, the same of Adam in exact and fp32 only.
inline constexpr int kManifestVersion = 4;
inline constexpr const char* kManifestFile = "manifest.json";
inline constexpr const char* kUnfinishedManifestFile = "manifest.json.tmp";  // until it is durable
inline constexpr int64_t kManifestBytesMax = int64_t{1} << 30;               // of millions of parameters

/// Something in a checkpoint folder is missing, malformed, or does not belong; what() names the file and the
/// way out.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A run of bytes in a file of the folder, with the XXH3-64 of each 64 KiB block.
struct FileRange {
  std::string file;  // a plain name, no separators
  int64_t offset = 0;
  int64_t bytes = 0;
  std::vector<uint64_t> block_checksums;
};

/// One component of one chunk. Element i of the range is element `begin + i` of the unit's flat, padded
/// space.
struct ManifestPiece {
  std::string component;  // one of the unit's
  int64_t begin = 0;      // elements; where the component has scales, a multiple of their block
  int64_t elements = 0;   // valid elements, behind them their scales; the range may be longer (padding)
  FileRange range;
};

/// A parameter: its range in the unit's flat space, shape, the order of its elements there, and the names
/// under which the model knows it (tied weights have several).
struct ManifestSegment {
  std::string name;
  std::vector<std::string> aliases;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements, as normal_strides gives them: empty where row-major
  int64_t begin = 0;
  int64_t elements = 0;
  int64_t step = 0;  // updates so far
  int64_t group = 0;
  bool trainable = true;
};

struct ManifestUnit {
  std::string name;
  std::string optimizer;                // as the update names it: "adam", ...; "" for a frozen unit
  std::string format;                   // the update's "fp32", "exact", ..., or "frozen"
  std::vector<std::string> components;  // the weight that forward used first; "hi" alone for a frozen unit
  std::string dtype;     // of the weights as forward uses them, safetensors' names: "BF16", "F32", …
  int64_t elements = 0;  // padded
  std::vector<ManifestSegment> segments;
  std::vector<ManifestPiece> pieces;
};

/// Part `number` of `of` equal parts of every unit's padded elements.
struct UnitShard {
  int64_t number = 0;
  int64_t of = 1;
};

/// A file with the pieces of one shard (index_file.h).
struct IndexFile {
  std::string file;
  int64_t bytes = 0;
  uint64_t checksum = 0;  // XXH3-64
  UnitShard shard;
};

struct Manifest {
  int version = kManifestVersion;
  int64_t step = 0;           // optimizer steps taken
  int64_t skipped_steps = 0;  // steps with non-finite gradients
  int64_t world = 1;
  std::vector<ManifestUnit> units;
  std::vector<IndexFile>
      indexes;  // of all shards, in their order; none of one that was read from version 2 or 3
  std::string extra_json = "{}";  // the caller's own data: scheduler, random states, data position
};

/// Reads and checks a folder's manifest with all of its pieces; one of version 2 or 3 is converted. Throws
/// CheckpointError. Checks version, names (no path separators, no ".."), that ranges lie inside their files,
/// that checksum counts fit, that segments lie inside their unit and pieces cover every segment's components
/// exactly once, that shapes fit element counts and strides fit shapes.
///
/// The checksum is compared before anything is parsed. Time is linear in the file's length; memory is at most
/// about eight times it.
Manifest read_manifest(const std::filesystem::path& folder, int64_t bytes_max = kManifestBytesMax);

/// The same without pieces, and the pieces of some shards: what was read is checked, other files are not
/// opened. Of version 2 and 3 all pieces are there at once.
Manifest read_manifest_text(const std::filesystem::path& folder, int64_t bytes_max = kManifestBytesMax);
void read_shards(const std::filesystem::path& folder, Manifest& manifest, std::span<const size_t> indexes);

/// The text of a manifest, without its pieces.
std::string manifest_text(const Manifest& manifest);

/// Writes the text durably: under a temporary name, fsync, rename, fsync of the folder. The caller has made
/// all other files durable before, the indexes too. Throws CheckpointError for a manifest that
/// read_manifest_text would refuse; then nothing has changed. `watch` sees what waits for the disk; null:
/// nothing does.
void write_manifest_text(const std::filesystem::path& folder, const Manifest& manifest,
                         int64_t bytes_max = kManifestBytesMax, io::StallWatch* watch = nullptr);

/// The same of a manifest with all pieces, which go into one index.
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest,
                    int64_t bytes_max = kManifestBytesMax, io::StallWatch* watch = nullptr);

/// Reads the first to.size() bytes of a range, verifying the checksum of every block they touch. Throws
/// CheckpointError naming file, offset and both checksums; then `to` holds nothing of use.
void read_range(const std::filesystem::path& folder, const FileRange& range, std::span<std::byte> to);

/// The same for the bytes from `begin` on.
void read_range_part(const std::filesystem::path& folder, const FileRange& range, int64_t begin,
                     std::span<std::byte> to);

/// Reads every byte that the manifest names and compares it with its checksum, in memory of 32 MiB. Throws
/// CheckpointError naming what does not fit. `progress` as in merge_checkpoint.
struct VerifyResult {
  int64_t step = 0;
  int64_t parameters = 0;
  int64_t files = 0;
  int64_t bytes = 0;
};
VerifyResult verify_checkpoint(const std::filesystem::path& folder, void (*progress)(void*, int64_t, int64_t),
                               void* context);

/// Streams a checkpoint into Hugging Face safetensors files in `out` (created; must be empty or absent):
/// model.safetensors, or shards of at most `shard_bytes` with an index. `dtype` is "bf16" or "fp32": the
/// first takes `hi` alone where that is bf16, else rounds the exact master; the second takes the master.
/// Tensors in these files are row-major, whatever their strides in the engine. Memory: about one tensor.
/// Written under temporary names and renamed when complete; after an error nothing remains. Frozen tensors
/// keep their dtype unless it is F16, BF16 or F32. Of tied weights only the first name is written: Hugging
/// Face ties the others when it loads. MergeOptions::tensors are written too, byte for byte: tensors of the
/// model that the engine does not hold, such as buffers. Throws CheckpointError where one has the name of
/// another tensor, or data that does not fit its dtype and shape. `progress(context, done, total)` in bytes;
/// may be null, may throw.
struct MergeTensor {
  std::string name;
  std::string dtype;  // safetensors' name
  std::vector<int64_t> shape;
  std::span<const std::byte> data;  // row-major; the caller's, until the merge has returned
};
struct MergeOptions {
  std::string dtype = "bf16";
  int64_t shard_bytes = int64_t{5} << 30;
  std::vector<MergeTensor> tensors = {};
};
struct MergeResult {
  int64_t tensors = 0;
  int64_t bytes = 0;
  std::vector<std::string> files;
};
MergeResult merge_checkpoint(const std::filesystem::path& checkpoint, const std::filesystem::path& out,
                             const MergeOptions& options, void (*progress)(void*, int64_t, int64_t),
                             void* context);

}  // namespace overspill::engine
