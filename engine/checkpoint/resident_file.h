// The file of a checkpoint that takes what was in memory: components, one after the other, with their
// checksums.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "engine/checkpoint/manifest.h"

namespace overspill::engine {

class ResidentFile {
 public:
  /// Creates nothing until the first append. Throws io::StoreError on every failure, naming file, offset and
  /// cause.
  explicit ResidentFile(const std::filesystem::path& folder);
  ResidentFile(const ResidentFile&) = delete;
  ResidentFile& operator=(const ResidentFile&) = delete;
  ~ResidentFile();

  /// `data` null: `bytes` zeros.
  FileRange append(const std::byte* data, int64_t bytes);

  /// Makes it durable.
  void finish();

 private:
  void write(const std::byte* data, int64_t bytes);

  std::filesystem::path path_;
  int fd_ = -1;
  int64_t end_ = 0;
  std::vector<std::byte> zeros_;
};

}  // namespace overspill::engine
