// Checkpoint to Hugging Face safetensors (https://github.com/huggingface/safetensors, "Format"): 8 bytes of
// little-endian header length, a JSON header padded with spaces, then the tensors without gaps.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/checkpoint_reader.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/merged_file.h"
#include "engine/checkpoint/weights.h"
#include "engine/partition/model.h"

namespace overspill::engine {
namespace {

/// Tensors in the manifest's order, behind them those given, cut into shards. A tensor larger than the
/// largest shard gets a shard of its own.
std::vector<MergedFile> plan_shards(const Manifest& manifest, const std::string& dtype,
                                    const MergeOptions& options) {
  std::vector<MergedFile> shards(1);
  const auto add = [&](MergedTensor tensor) {
    if (!shards.back().tensors.empty() && tensor.bytes > options.shard_bytes - shards.back().bytes)
      shards.emplace_back();
    shards.back().bytes += tensor.bytes;
    shards.back().tensors.push_back(std::move(tensor));
  };
  for (const ManifestUnit& unit : manifest.units) {
    const std::string merged = merged_dtype(unit, dtype);
    for (const ManifestSegment& segment : unit.segments)
      add({&unit, &segment, nullptr, merged, segment.elements * dtype_bytes(merged)});
  }
  for (const MergeTensor& given : options.tensors)
    add({nullptr, nullptr, &given, given.dtype, static_cast<int64_t>(given.data.size())});
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].name = shards.size() == 1
                         ? "model.safetensors"
                         : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    // Wide elements first, as safetensors' own writer does, so that every tensor is aligned to its element.
    std::ranges::stable_sort(shards[i].tensors, std::ranges::greater(),
                             [](const MergedTensor& tensor) { return dtype_bytes(tensor.dtype); });
  }
  return shards;
}

std::string index_of(const std::vector<MergedFile>& shards, int64_t bytes_total) {
  nlohmann::json weight_map = nlohmann::json::object();
  for (const MergedFile& shard : shards) {
    for (const MergedTensor& tensor : shard.tensors) weight_map[tensor.name()] = shard.name;
  }
  return nlohmann::json{{"metadata", {{"total_size", bytes_total}}}, {"weight_map", std::move(weight_map)}}
      .dump(2);
}

/// The output folder: files get their names in commit(), all together; without it the destructor leaves
/// nothing behind.
class Output {
 public:
  explicit Output(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::error_code error;
    created_ = std::filesystem::create_directories(folder_, error);
    const bool empty = !error && only_leftovers();
    if (error) {
      throw CheckpointError(fmt::format("{}: cannot be used for the merged model: {}; choose another folder",
                                        folder_.string(), error.message()));
    }
    if (!empty) {
      throw CheckpointError(
          fmt::format("{}: not empty, and nothing there is overwritten; choose a new folder or empty it",
                      folder_.string()));
    }
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  ~Output() {
    if (committed_) return;
    std::error_code ignored;
    for (const std::string& file : files_) {
      std::filesystem::remove(temporary(file), ignored);
      std::filesystem::remove(folder_ / file, ignored);
    }
    if (created_) std::filesystem::remove(folder_, ignored);
  }

  CheckpointFile add(const std::string& file) {
    files_.push_back(file);
    return CheckpointFile::create(temporary(file), 0666);  // less the user's umask: a model is for sharing
  }

  void commit() {
    for (const std::string& file : files_) rename_file(temporary(file), folder_ / file);
    sync_folder(folder_);
    committed_ = true;
  }

  const std::vector<std::string>& files() const { return files_; }

 private:
  /// Removes what a merge that was killed left here: files with the temporary names of this class. False
  /// where there is anything else; then nothing is removed.
  bool only_leftovers() const {
    std::error_code error;
    std::vector<std::filesystem::path> leftovers;
    for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
      const std::string name = entry.path().filename().string();
      const bool ours = name.starts_with("model") &&
                        (name.ends_with(".safetensors.tmp") || name.ends_with(".safetensors.index.json.tmp"));
      if (!ours || !entry.is_regular_file(error)) return false;
      leftovers.push_back(entry.path());
    }
    for (const std::filesystem::path& path : leftovers) std::filesystem::remove(path, error);
    return !error;
  }

  std::filesystem::path temporary(const std::string& file) const { return folder_ / (file + ".tmp"); }

  std::filesystem::path folder_;
  std::vector<std::string> files_;
  bool created_ = false;
  bool committed_ = false;
};

void write_text(CheckpointFile file, const std::string& text) {
  file.write(std::as_bytes(std::span(text)));
  file.sync();
}

/// Whether the bytes are those of the dtype and the shape.
bool fits(const MergeTensor& tensor) {
  const int64_t element_bytes = dtype_bytes(tensor.dtype);
  const auto bytes = static_cast<int64_t>(tensor.data.size());
  if (element_bytes == 0 || std::ranges::any_of(tensor.shape, [](int64_t length) { return length < 0; }))
    return false;
  if (std::ranges::find(tensor.shape, 0) != tensor.shape.end()) return bytes == 0;
  int64_t elements = 1;
  for (const int64_t length : tensor.shape) {
    if (length > bytes / elements) return false;
    elements *= length;
  }
  return elements * element_bytes == bytes;
}

/// Throws CheckpointError for a given tensor that does not fit, or whose name another tensor has.
void check_given(const std::filesystem::path& checkpoint, const Manifest& manifest,
                 const std::vector<MergeTensor>& given) {
  std::set<std::string_view> names{"__metadata__"};
  for (const ManifestUnit& unit : manifest.units)
    for (const ManifestSegment& segment : unit.segments) names.insert(segment.name);
  for (const MergeTensor& tensor : given) {
    if (!names.insert(tensor.name).second) {
      throw CheckpointError(fmt::format("{}: two tensors have the name '{}'; use another checkpoint",
                                        checkpoint.string(), tensor.name));
    }
    if (!fits(tensor)) {
      throw CheckpointError(fmt::format(
          "{}: '{}' has {} bytes, which are not those of {} in the shape [{}]; use another checkpoint",
          checkpoint.string(), tensor.name, tensor.data.size(), tensor.dtype, fmt::join(tensor.shape, ", ")));
    }
  }
}

}  // namespace

MergeResult merge_checkpoint(const std::filesystem::path& checkpoint, const std::filesystem::path& out,
                             const MergeOptions& options, void (*progress)(void*, int64_t, int64_t),
                             void* context) {
  if (options.dtype != "bf16" && options.dtype != "fp32") {
    throw CheckpointError(fmt::format("merge to the dtype '{}'; choose bf16 or fp32", options.dtype));
  }
  if (options.shard_bytes < 1) {
    throw CheckpointError(fmt::format("merge to shards of {} bytes; give 1 or more", options.shard_bytes));
  }
  const Manifest manifest = read_manifest(checkpoint);
  check_given(checkpoint, manifest, options.tensors);
  const auto shards = plan_shards(manifest, options.dtype == "bf16" ? "BF16" : "F32", options);
  MergeResult result;
  for (const MergedFile& shard : shards) {
    result.tensors += static_cast<int64_t>(shard.tensors.size());
    result.bytes += shard.bytes;
  }
  Output output(out);
  const CheckpointReader reader(checkpoint);
  int64_t before = 0;  // of the shards that are written
  for (const MergedFile& shard : shards) {
    CheckpointFile file = output.add(shard.name);
    write_merged(reader, shard, file, [&](int64_t done) {
      if (progress != nullptr) progress(context, before + done, result.bytes);
    });
    before += shard.bytes;
  }
  if (shards.size() > 1)
    write_text(output.add("model.safetensors.index.json"), index_of(shards, result.bytes));
  output.commit();
  result.files = output.files();
  return result;
}

}  // namespace overspill::engine
