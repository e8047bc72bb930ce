// Layers that are not held in memory: read anew for each pass, ahead of use.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "inference/format/model_folder.h"
#include "inference/kernels/panel.h"
#include "inference/model/spec.h"
#include "inference/run/matrix.h"
#include "kernels/host_pages.h"

namespace overspill::inference {

/// A matrix that is wanted, and where its view is.
struct WantedMatrix {
  const MatrixSpec* spec;
  Matrix* to;
};

/// A layer's matrices, which lie behind each other in a slot.
struct StreamedLayer {
  size_t layer = 0;
  std::vector<WantedMatrix> matrices;
  int64_t bytes = 0;       // in a slot
  int64_t read_bytes = 0;  // of the folder
};

/// Reads layers in the order of a pass, and again from the first, into a few slots of memory: as many layers
/// ahead as there are free slots. What is read is packed as it would be for memory, so that a streamed model
/// computes the same bits. Its thread reads; the kernel is asked to keep nothing of the files.
class LayerStream {
 public:
  /// The folder, and the matrices that are pointed to, outlive this. Throws std::bad_alloc, or
  /// io::StoreError where the machine refuses a thread.
  LayerStream(const ModelFolder& folder, std::vector<StreamedLayer> layers, int slots);
  LayerStream(const LayerStream&) = delete;
  LayerStream& operator=(const LayerStream&) = delete;
  ~LayerStream();

  /// Whether the layer is one of these; they come in the order given, each acquired and released once a pass.
  bool has(size_t layer) const;
  /// Returns when the layer's matrices are there, until its release. Throws what reading threw, from then on.
  void acquire(size_t layer);
  void release();  // of the layer acquired last
  /// What one pass reads.
  int64_t bytes() const { return bytes_; }

 private:
  void serve();
  void fill(const StreamedLayer& layer, std::byte* slot);

  const ModelFolder& folder_;
  const std::vector<StreamedLayer> layers_;
  int64_t bytes_ = 0;
  std::vector<kernels::HostPages> slots_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t filled_ = 0, acquired_ = 0, released_ = 0;  // layers, since the beginning
  bool ends_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace overspill::inference
