// What the stall watch (io/stall_watch.h) has found, for reports.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace overspill::io {

/// What hangs now, for code that must not touch an engine that may hang, too (a signal handler). Outlives the
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
