// Checkpoint to Hugging Face safetensors (https://github.com/huggingface/safetensors, "Format"): 8 bytes of
// little-endian header length, a JSON header padded with spaces, then the tensors without gaps.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/manifest_check.h"
#include "engine/checkpoint/weights.h"
#include "engine/partition/strides.h"

namespace overspill::engine {
namespace {

constexpr int64_t kRunElements =
    int64_t{1} << 20;  // read, converted and written at a time: the memory of a merge of row-major tensors

struct Tensor {
  const ManifestUnit* unit = nullptr;
  const ManifestSegment* segment = nullptr;
  std::string dtype;
  int64_t bytes = 0;
};

struct Shard {
  std::string file;
  std::vector<Tensor> tensors;
  int64_t bytes = 0;
};

/// Tensors in the manifest's order, cut into shards. A tensor larger than `shard_bytes` gets a shard of its
/// own.
std::vector<Shard> plan_shards(const Manifest& manifest, const std::string& dtype, int64_t shard_bytes) {
  std::vector<Shard> shards(1);
  for (const ManifestUnit& unit : manifest.units) {
    const std::string merged = merged_dtype(unit, dtype);
    for (const ManifestSegment& segment : unit.segments) {
      const int64_t bytes = segment.elements * dtype_bytes(merged);
      if (!shards.back().tensors.empty() && bytes > shard_bytes - shards.back().bytes) shards.emplace_back();
      shards.back().tensors.push_back({&unit, &segment, merged, bytes});
      shards.back().bytes += bytes;
    }
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].file = shards.size() == 1
                         ? "model.safetensors"
                         : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    // Wide elements first, as safetensors' own writer does, so that every tensor is aligned to its element.
    std::ranges::stable_sort(shards[i].tensors, std::ranges::greater(),
                             [](const Tensor& tensor) { return dtype_bytes(tensor.dtype); });
  }
  return shards;
}

/// Header length and header, padded to 8 bytes.
std::string header_of(const Shard& shard) {
  nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t begin = 0;
  for (const Tensor& tensor : shard.tensors) {
    header[tensor.segment->name] = {{"dtype", tensor.dtype},
                                    {"shape", tensor.segment->shape},
                                    {"data_offsets", {begin, begin + tensor.bytes}}};
    begin += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + text;
}

std::string index_of(const std::vector<Shard>& shards, int64_t bytes_total) {
  nlohmann::json weight_map = nlohmann::json::object();
  for (const Shard& shard : shards) {
    for (const Tensor& tensor : shard.tensors) weight_map[tensor.segment->name] = shard.file;
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
    if (!error) remove_leftovers();
    const bool empty = !error && std::filesystem::is_empty(folder_, error);
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
  /// What a merge that was killed left here: files with the temporary names of this class.
  void remove_leftovers() const {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
      const std::string name = entry.path().filename().string();
      const bool ours = name.starts_with("model") &&
                        (name.ends_with(".safetensors.tmp") || name.ends_with(".safetensors.index.json.tmp"));
      if (ours && entry.is_regular_file(error)) std::filesystem::remove(entry.path(), error);
    }
  }

  std::filesystem::path temporary(const std::string& file) const { return folder_ / (file + ".tmp"); }

  std::filesystem::path folder_;
  std::vector<std::string> files_;
  bool created_ = false;
  bool committed_ = false;
};

struct Progress {
  void (*call)(void*, int64_t, int64_t);
  void* context;
  int64_t done = 0;
  int64_t total = 0;

  void add(int64_t bytes) {
    done += bytes;
    if (call != nullptr) call(context, done, total);
  }
};

void write_text(CheckpointFile file, const std::string& text) {
  file.write(std::as_bytes(std::span(text)));
  file.sync();
}

/// The tensor as it lies in the checkpoint is what safetensors want.
void stream(WeightReader& reader, const Tensor& tensor, CheckpointFile& file, Progress& progress) {
  for (int64_t done = 0; done < tensor.segment->elements; done += kRunElements) {
    const int64_t count = std::min(kRunElements, tensor.segment->elements - done);
    const auto bytes = reader.read(tensor.segment->begin + done, count, tensor.dtype);
    file.write(bytes);
    progress.add(static_cast<int64_t>(bytes.size()));
  }
}

/// The same for a tensor that lies in another order: its first row may need its last element, so all of it is
/// brought into memory.
void reorder(WeightReader& reader, const Tensor& tensor, CheckpointFile& file, Progress& progress) {
  RowMajor order(tensor.segment->shape, tensor.segment->strides);
  std::vector<std::byte> whole(static_cast<size_t>(tensor.bytes));
  for (int64_t done = 0; done < tensor.segment->elements; done += kRunElements) {
    const int64_t count = std::min(kRunElements, tensor.segment->elements - done);
    const auto bytes = reader.read(tensor.segment->begin + done, count, tensor.dtype);
    order.place(bytes, dtype_bytes(tensor.dtype), whole);
    progress.add(static_cast<int64_t>(bytes.size()));
  }
  file.write(whole);
}

void write_shard(const std::filesystem::path& checkpoint, const Shard& shard, CheckpointFile file,
                 Progress& progress) {
  const std::string header = header_of(shard);
  file.write(std::as_bytes(std::span(header)));
  // One reader for all neighbouring tensors of a unit.
  const ManifestUnit* unit = nullptr;
  std::unique_ptr<WeightReader> reader;
  for (const Tensor& tensor : shard.tensors) {
    if (tensor.unit != unit) {
      unit = tensor.unit;
      reader = std::make_unique<WeightReader>(checkpoint, *unit);
    }
    const auto write = tensor.segment->strides.empty() ? stream : reorder;
    write(*reader, tensor, file, progress);
  }
  file.sync();
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
  const auto shards = plan_shards(manifest, options.dtype == "bf16" ? "BF16" : "F32", options.shard_bytes);
  MergeResult result;
  for (const Shard& shard : shards) {
    result.tensors += static_cast<int64_t>(shard.tensors.size());
    result.bytes += shard.bytes;
  }
  Output output(out);
  Progress reported{progress, context, 0, result.bytes};
  for (const Shard& shard : shards) write_shard(checkpoint, shard, output.add(shard.file), reported);
  if (shards.size() > 1)
    write_text(output.add("model.safetensors.index.json"), index_of(shards, result.bytes));
  output.commit();
  result.files = output.files();
  return result;
}

}  // namespace overspill::engine
