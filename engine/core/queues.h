// The queues that callers compute on: a framework's own, such as PyTorch's current CUDA stream. Work on them
// and the engine's copies wait for each other on the device, so the caller's thread may run ahead.
#pragma once

#include <map>
#include <memory>

#include "base/mutex.h"
#include "engine/base/queue.h"
#include "engine/core/engine_mutex.h"
#include "kernels/device.h"

namespace overspill::engine {

/// Streams over such queues. Thread-safe. A call may block until the device's launch queue has room. So no
/// call is made with the engine's mutex held, which all workers need.
class Queues {
 public:
  explicit Queues(kernels::Device& device) : device_(device) {}
  /// The stream lives as long as this object; one thread at a time may use it. Throws kernels::DeviceError.
  kernels::Stream& of(Queue queue) EXCLUDES(engine_mutex) {
    const MutexLock guard(mutex_);
    return stream(queue);
  }
  /// An event that is reached when the queue has done its work so far. Throws kernels::DeviceError.
  kernels::Event record(Queue queue) EXCLUDES(engine_mutex) {
    const MutexLock guard(mutex_);
    return stream(queue).record();
  }
  /// Makes work that the queue is given from now on wait for the event. Throws kernels::DeviceError.
  void wait(Queue queue, const kernels::Event& event) EXCLUDES(engine_mutex) {
    const MutexLock guard(mutex_);
    stream(queue).wait(event);
  }

 private:
  kernels::Stream& stream(Queue queue) REQUIRES(mutex_) {
    std::unique_ptr<kernels::Stream>& stream = streams_[queue.native];
    if (stream == nullptr) stream = device_.adopt_stream(queue.native);
    return *stream;
  }

  kernels::Device& device_;
  Mutex mutex_;  // no call is made with the engine's
  std::map<void*, std::unique_ptr<kernels::Stream>> streams_ GUARDED_BY(mutex_);
};

}  // namespace overspill::engine
