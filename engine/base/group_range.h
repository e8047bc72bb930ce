// The parameter groups of one optimizer, where several optimizers train parts of one model.
#pragma once

#include <cstdint>
#include <limits>

namespace overspill::engine {

/// Groups first <= group < end; by default all. One optimizer has all segments of a unit.
struct GroupRange {
  int64_t first = 0;
  int64_t end = std::numeric_limits<int64_t>::max();

  bool all() const { return first == 0 && end == std::numeric_limits<int64_t>::max(); }
  bool has(int64_t group) const { return group >= first && group < end; }
};

}  // namespace overspill::engine
