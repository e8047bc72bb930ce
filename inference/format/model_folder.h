// A Hugging Face folder: config.json, generation_config.json, and tensors in one or several safetensors
// files. The folder is not trusted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "inference/format/safetensors.h"
#include "io/unique_fd.h"

namespace overspill::inference {

/// What offsets, lengths and addresses of direct reads are multiples of, on every file system.
inline constexpr int64_t kDirectBytes = 4096;

class ModelFolder {
 public:
  /// Reads the small files and the headers of the large ones, and checks them. A symbolic link is followed
  /// inside the folder, and to the folder `blobs` of the hub's cache if the folder is one of its snapshots;
  /// one that leads elsewhere is an error, and nothing is read there. Throws ModelError.
  explicit ModelFolder(const std::filesystem::path& folder);

  const std::filesystem::path& path() const { return path_; }
  const nlohmann::json& config() const { return config_; }
  /// Every token that ends a text, by generation_config.json and config.json.
  const std::vector<int32_t>& end_tokens() const { return end_tokens_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  /// Null where there is none of the name.
  const StoredTensor* find(std::string_view name) const;
  /// Fills `to` from the tensor's bytes, beginning at its byte `offset`. Threads: any. Throws ModelError for
  /// a file that became shorter, io::StoreError for a disk that fails.
  void read(const StoredTensor& tensor, int64_t offset, std::span<std::byte> to) const;
  /// `bytes` of the tensor from `offset` on, read past the page cache into `room`, whose address is a
  /// multiple of kDirectBytes and which has room for two of these more. Where the file system reads through
  /// the cache only, the kernel is asked to keep nothing. Returns where in `room` they are. Threads and
  /// errors: as read.
  std::span<const std::byte> read_direct(const StoredTensor& tensor, int64_t offset, int64_t bytes,
                                         std::span<std::byte> room) const;

 private:
  struct File {
    std::filesystem::path path;
    io::UniqueFd fd;
    io::UniqueFd direct;  // the same with O_DIRECT; none where the file system refuses
    int64_t bytes = 0;
  };

  File open(const std::string& name) const;
  nlohmann::json read_json(const std::string& name, int64_t bytes_max) const;
  std::vector<std::string> weight_files(std::unordered_map<std::string, std::string>& index) const;
  void read_headers(const std::string& name);
  const File& file_of(const StoredTensor& tensor, int64_t offset, int64_t bytes) const;
  void read_bytes(const File& file, int64_t offset, std::span<std::byte> to) const;

  std::filesystem::path path_;      // as given
  std::filesystem::path roots_[2];  // canonical: the folder, and the hub's blobs or nothing
  nlohmann::json config_;
  std::vector<int32_t> end_tokens_;
  std::vector<File> files_;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string_view, size_t> by_name_;
};

}  // namespace overspill::inference
