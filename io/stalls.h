// What the stall watch (io/stall_watch.h) has found, for reports.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace overspill::io {

struct StallStats {
  int64_t count = 0;       // that were told
  int64_t longest_ns = 0;  // of those that are over, or told so far
  int64_t now_ns = 0;      // that one has lasted; 0 where none is told
};

/// What hangs now, for who must not touch an engine that may hang too (a signal's handler). Outlives the
/// store.
class StallBoard {
 public:
  /// Empty where nothing hangs.
  std::string text() const;
  void set(const void* who, std::string text);

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<const void*, std::string>> texts_;
};

}  // namespace overspill::io
