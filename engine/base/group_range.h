// The parameter groups of one optimizer, where several train parts of one model.
#pragma once

#include <cstdint>
#include <limits>

namespace overspill::engine {

/// Groups first <= group < end; all there are, unless said. A unit's segments are all of one optimizer.
struct GroupRange {
  int64_t first = 0;
  int64_t end = std::numeric_limits<int64_t>::max();

  bool all() const { return first == 0 && end == std::numeric_limits<int64_t>::max(); }
  bool has(int64_t group) const { return group >= first && group < end; }
};

}  // namespace overspill::engine
