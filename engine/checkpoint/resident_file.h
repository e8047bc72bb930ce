// The file of a checkpoint with the components that were in host memory, one after the other. Their checksums
// go into the manifest.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "base/mutex.h"
#include "engine/checkpoint/manifest.h"
#include "io/stall_watch.h"
#include "io/unique_fd.h"

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

  /// Any thread; several at once.
  FileRange append(std::span<const std::byte> data) EXCLUDES(mutex_);

  /// Makes it durable. No append is under way.
  void finish() EXCLUDES(mutex_);

 private:
  void open() REQUIRES(mutex_);
  void write(int fd, const std::byte* data, int64_t bytes, int64_t offset);

  const std::filesystem::path path_;
  io::StallWatch* const watch_;
  Mutex mutex_;
  io::UniqueFd fd_ GUARDED_BY(mutex_);
  int64_t end_ GUARDED_BY(mutex_) = 0;
};

}  // namespace overspill::engine
