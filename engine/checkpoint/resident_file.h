// The file of a checkpoint with the components that were in host memory, one after the other. Their checksums
// go into the manifest.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "engine/checkpoint/manifest.h"
#include "io/stall_watch.h"

namespace overspill::engine {

inline constexpr const char* kResidentFile = "resident.bin";

class ResidentFile {
 public:
  /// Creates nothing until the first append. Throws io::StoreError on every failure, naming file, offset and
  /// cause.
  /// `watch` sees what waits for the disk, and outlives this; null: nothing does.
  explicit ResidentFile(const std::filesystem::path& folder, io::StallWatch* watch = nullptr);
  ResidentFile(const ResidentFile&) = delete;
  ResidentFile& operator=(const ResidentFile&) = delete;
  ~ResidentFile();

  FileRange append(std::span<const std::byte> data);

  /// Makes it durable.
  void finish();

 private:
  void write(const std::byte* data, int64_t bytes);

  std::filesystem::path path_;
  io::StallWatch* const watch_;
  int fd_ = -1;
  int64_t end_ = 0;
};

}  // namespace overspill::engine
