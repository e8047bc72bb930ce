// A lock that is given in the order in which it was asked for.
#pragma once

#include <cstdint>

#include "base/mutex.h"

namespace overspill::inference {

/// For MutexLock. A Mutex may go to the thread that has just released it, again and again, while
/// others wait: a batch computes pass after pass, and a session that shares its model would get no turn.
class CAPABILITY("turn") Turns {
 public:
  void lock() ACQUIRE() {
    const MutexLock lock(mutex_);
    const int64_t mine = asked_++;
    while (ended_ != mine) changed_.wait(mutex_);
  }
  void unlock() RELEASE() {
    {
      const MutexLock lock(mutex_);
      ++ended_;
    }
    changed_.notify_all();
  }
  /// How many turns were asked for and have not ended: that of the holder, and those that wait.
  int64_t open() const {
    const MutexLock lock(mutex_);
    return asked_ - ended_;
  }

 private:
  mutable Mutex mutex_;
  Condition changed_;
  int64_t asked_ GUARDED_BY(mutex_) = 0;
  int64_t ended_ GUARDED_BY(mutex_) = 0;
};

}  // namespace overspill::inference
