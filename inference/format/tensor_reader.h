// Reading tensors into memory that is used again for the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "inference/format/model_folder.h"
#include "kernels/host_pages.h"

namespace overspill::inference {

/// Which way bytes come: through the kernel's page cache, which may have them already, or past it where the
/// file system can do that. What is read again for every token and does not fit in memory comes directly.
enum class ReadPath : uint8_t { cached, direct };

/// For one thread at a time. The folder outlives it.
class TensorReader {
 public:
  TensorReader(const ModelFolder& folder, ReadPath path) : folder_(folder), path_(path) {}

  const ModelFolder& folder() const { return folder_; }
  /// The tensor's bytes from `offset` on; valid until the next call. Throws as ModelFolder::read does, and
  /// std::bad_alloc.
  std::span<const std::byte> read(const StoredTensor& tensor, int64_t offset, int64_t bytes);

 private:
  const ModelFolder& folder_;
  ReadPath path_;
  kernels::HostPages memory_;
};

}  // namespace overspill::inference
