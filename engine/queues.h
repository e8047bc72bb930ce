// The queues that callers compute on: a framework's own, such as PyTorch's current CUDA stream. Work there
// and the engine's copies wait for each other on the device, so that the caller may run ahead of it.
#pragma once

#include <map>
#include <memory>

#include "kernels/device.h"

namespace overspill::engine {

/// What native() of a stream of the engine's device is. It outlives the engine, and every lease.
struct Queue {
  void* native = nullptr;
  friend bool operator==(const Queue&, const Queue&) = default;
};

/// Streams over such queues. One thread at a time.
class Queues {
 public:
  explicit Queues(kernels::Device& device) : device_(device) {}
  /// Lives as long as this. Throws kernels::DeviceError.
  kernels::Stream& of(Queue queue) {
    std::unique_ptr<kernels::Stream>& stream = streams_[queue.native];
    if (stream == nullptr) stream = device_.adopt_stream(queue.native);
    return *stream;
  }

 private:
  kernels::Device& device_;
  std::map<void*, std::unique_ptr<kernels::Stream>> streams_;
};

}  // namespace overspill::engine
