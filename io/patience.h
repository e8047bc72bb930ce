// How long the store bears with a disk: which errors are tried again, how often, how soon; and when a disk
// that does not answer is named, and given up. Only values: the queue of pieces retries (io/piece_queue.h),
// the stall watch names disks and gives up (io/stall_watch.h).
#pragma once

#include <chrono>
#include <cstdint>

namespace overspill::io {

/// Ten more tries after 5 ms, 10 ms, 20 ms and so on: 5.1 s in all.
struct RetryPolicy {
  int tries_max = 10;  // after the first
  std::chrono::nanoseconds first_wait{std::chrono::milliseconds(5)};
  int growth = 2;

  /// Before the n-th further try, n from 1.
  std::chrono::nanoseconds wait_before(int n) const {
    std::chrono::nanoseconds wait = first_wait;
    for (int i = 1; i < n; ++i) wait *= growth;
    return wait;
  }
};

struct StallPolicy {
  std::chrono::nanoseconds tell_after{std::chrono::seconds(10)};  // then after twice that, and so on
  std::chrono::nanoseconds give_up_after{0};                      // 0: never
};

struct Patience {
  RetryPolicy retry;
  StallPolicy stall;
};

/// Whether a request that failed with this errno may succeed on the same bytes of the disk later: a read
/// after a passing error of the disk or the way to it (EIO, ETIMEDOUT and equivalents), a read or write after
/// a passing shortage of the machine (ENOMEM, EAGAIN, EBUSY).
bool may_pass(int os_error, bool writes);

/// Whether a write that failed with this errno may succeed in another place of the same path: after an error
/// of one place or a passing one, or when there was no room, since others may free some.
bool may_pass_elsewhere(int os_error);

/// The machine's memory or the kernel's queues, not the disk.
bool is_shortage(int os_error);

}  // namespace overspill::io
