// What the stall watch (io/stall_watch.h) has found, for reports.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace overspill::io {

struct StallStats {
  int64_t count = 0;       // stalls that stderr has named
  int64_t longest_ns = 0;  // the longest of them; of one that goes on, the time when it was last named
  int64_t now_ns = 0;      // how long the stall that goes on had lasted when it was last named; 0: none does
};

/// What hangs now, for who must not touch an engine that may hang too (a signal's handler). Outlives the
/// store.
class StallBoard {
 public:
  /// Empty where nothing hangs.
  std::string text() const;
  void set(const void* who, std::string text);

 private:
  mutable Mutex mutex_;
  std::vector<std::pair<const void*, std::string>> texts_ GUARDED_BY(mutex_);
};

}  // namespace overspill::io
