// An event that is none of the device's.
#pragma once

#include <condition_variable>
#include <mutex>

#include "kernels/device.h"

namespace overspill::kernels {

/// An event that the test itself reaches: a stream that waits for it stands still until then, so nothing
/// below depends on timing.
class Gate final : public Event::State {
 public:
  bool done() override {
    const std::lock_guard lock(mutex_);
    return open_;
  }
  void wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

}  // namespace overspill::kernels
