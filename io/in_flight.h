// Counts transfers between submit() and the end of their callback, so that drain() can wait for those before
// it.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "io/store.h"

namespace overspill::io {

class InFlight {
 public:
  void begin(Transfer& transfer) {
    const std::lock_guard lock(mutex_);
    transfer.epoch = epoch_;
    ++counts_[epoch_];
    max_ = std::max(max_, counts_[0] + counts_[1]);
  }

  /// `epoch` as the transfer had it before its callback, which may have submitted it again.
  void end(uint8_t epoch) {
    const std::lock_guard lock(mutex_);
    if (--counts_[epoch] == 0) none_.notify_all();
  }

  /// One drain at a time: it turns to the other epoch, which the drain before has emptied. `poll` as
  /// Store::poll.
  template <class Poll>
  void drain(Poll poll) {
    const std::lock_guard one_at_a_time(drain_mutex_);
    const uint8_t before = turn();
    while (left(before) > 0 && poll()) {
    }
    std::unique_lock lock(mutex_);
    none_.wait(lock, [&] { return counts_[before] == 0; });
  }

  int64_t max() const {
    const std::lock_guard lock(mutex_);
    return max_;
  }

 private:
  uint8_t turn() {
    const std::lock_guard lock(mutex_);
    const uint8_t before = epoch_;
    epoch_ = before == 0 ? 1 : 0;
    return before;
  }
  int64_t left(uint8_t epoch) const {
    const std::lock_guard lock(mutex_);
    return counts_[epoch];
  }

  std::mutex drain_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable none_;
  std::array<int64_t, 2> counts_{};
  int64_t max_ = 0;
  uint8_t epoch_ = 0;
};

}  // namespace overspill::io
