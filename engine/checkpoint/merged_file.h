// One file of a merged model: which bytes it has, and the threads that write them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/checkpoint_reader.h"
#include "engine/checkpoint/manifest.h"

namespace overspill::engine {

/// What is written: a parameter of the checkpoint, or a tensor that the caller gave.
struct MergedTensor {
  const ManifestUnit* unit = nullptr;
  const ManifestSegment* segment = nullptr;
  const MergeTensor* given = nullptr;  // then the two above are null
  std::string dtype;
  int64_t bytes = 0;

  const std::string& name() const { return given != nullptr ? given->name : segment->name; }
  const std::vector<int64_t>& shape() const { return given != nullptr ? given->shape : segment->shape; }
};

struct MergedFile {
  std::string name;
  std::vector<MergedTensor> tensors;  // in the order of the file
  int64_t bytes = 0;                  // of the tensors
};

/// Writes all of the file and makes it durable. The file is cut into runs that several threads read, convert
/// and write beside each other; what is read and written goes past the page cache. Memory: 7 MiB a thread at
/// most, and the largest tensor whose order in memory is not row-major. report(bytes of tensors so far): on
/// the calling thread; what it throws ends the work.
void write_merged(const CheckpointReader& checkpoint, const MergedFile& merged, CheckpointFile& file,
                  const std::function<void(int64_t)>& report);

}  // namespace overspill::engine
