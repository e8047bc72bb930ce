// What callers wait for now: updates of units, and gathered weights. The schedule serves these first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine/core/engine_mutex.h"

namespace overspill::engine {

struct Demand {
  /// Reserves memory for `count` units, so that later calls do not allocate.
  explicit Demand(size_t count) { updates.reserve(count); }

  /// The unit's updates come before others, until end_updates().
  void want_updates(int32_t unit) REQUIRES(engine_mutex) {
    end_updates(unit);
    updates.push_back(unit);
  }
  void end_updates(int32_t unit) REQUIRES(engine_mutex) { std::erase(updates, unit); }

  /// Whether a caller waits for the unit's gathered weights.
  bool awaits(int32_t unit) const REQUIRES(engine_mutex) {
    return std::ranges::find(weights, unit) != weights.end();
  }

  /// Units whose updates somebody waits for; the latest comes first.
  std::vector<int32_t> updates GUARDED_BY(engine_mutex);
  /// Units whose gathered weights callers wait for; the oldest comes first.
  std::vector<int32_t> weights GUARDED_BY(engine_mutex);
};

/// While it lives, a caller waits for the unit's weights: other ranks serve it first.
class Awaiting {
 public:
  Awaiting(Demand& demand, int32_t unit) REQUIRES(engine_mutex) : demand_(demand), unit_(unit) {
    demand_.weights.push_back(unit);
  }
  ~Awaiting() REQUIRES(engine_mutex) { demand_.weights.erase(std::ranges::find(demand_.weights, unit_)); }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;

 private:
  Demand& demand_;
  const int32_t unit_;
};

}  // namespace overspill::engine
