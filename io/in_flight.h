// Counts transfers between submit() and the end of their callback, so that drain() can wait for those before
// it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/mutex.h"
#include "io/store.h"

namespace overspill::io {

class InFlight {
 public:
  void begin(Transfer& transfer) {
    const MutexLock lock(mutex_);
    transfer.epoch = epoch_;
    ++counts_[epoch_];
    max_ = std::max(max_, counts_[0] + counts_[1]);
  }

  /// `epoch` as the transfer had it before its callback, which may have submitted it again.
  void end(uint8_t epoch) {
    const MutexLock lock(mutex_);
    if (--counts_[epoch] == 0) none_.notify_all();
  }

  /// One drain at a time: it turns to the other epoch, which the drain before has emptied. `poll` as
  /// Store::poll.
  template <class Poll>
  void drain(Poll poll) EXCLUDES(drain_mutex_) {
    const MutexLock one_at_a_time(drain_mutex_);
    const uint8_t before = turn();
    while (left(before) > 0 && poll()) {
    }
    const MutexLock lock(mutex_);
    while (counts_[before] != 0) none_.wait(mutex_);
  }

  int64_t max() const {
    const MutexLock lock(mutex_);
    return max_;
  }

 private:
  uint8_t turn() {
    const MutexLock lock(mutex_);
    const uint8_t before = epoch_;
    epoch_ = before == 0 ? 1 : 0;
    return before;
  }
  int64_t left(uint8_t epoch) const {
    const MutexLock lock(mutex_);
    return counts_[epoch];
  }

  Mutex drain_mutex_ ACQUIRED_BEFORE(mutex_);
  mutable Mutex mutex_;
  Condition none_;
  std::array<int64_t, 2> counts_ GUARDED_BY(mutex_){};
  int64_t max_ GUARDED_BY(mutex_) = 0;
  uint8_t epoch_ GUARDED_BY(mutex_) = 0;
};

}  // namespace overspill::io
