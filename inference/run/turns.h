// A lock that is given in the order in which it was asked for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace overspill::inference {

/// For std::lock_guard. A std::mutex may go to the thread that has just released it, again and again, while
/// others wait: a batch computes pass after pass, and a session that shares its model would get no turn.
class Turns {
 public:
  void lock() {
    std::unique_lock lock(mutex_);
    const int64_t mine = asked_++;
    changed_.wait(lock, [&] { return ended_ == mine; });
  }
  void unlock() {
    {
      const std::lock_guard lock(mutex_);
      ++ended_;
    }
    changed_.notify_all();
  }
  /// How many turns were asked for and have not ended: that of the holder, and those that wait.
  int64_t open() const {
    const std::lock_guard lock(mutex_);
    return asked_ - ended_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int64_t asked_ = 0;
  int64_t ended_ = 0;
};

}  // namespace overspill::inference
