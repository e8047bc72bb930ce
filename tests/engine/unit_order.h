// The order in which a simulated pass uses its units.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/engine/simulation_setup.h"

namespace overspill::testing {

class UnitOrder {
 public:
  /// Each once, from the first.
  explicit UnitOrder(int units) : of_(units), order_(static_cast<size_t>(units)) {
    std::iota(order_.begin(), order_.end(), 0);
  }

  /// Units that are left out, used again, in another order: the trace departs.
  void redraw(Draw& draw) {
    order_.clear();
    for (int u = 0; u < of_; ++u) {
      if (draw.chance(0.9)) order_.push_back(u);
      if (draw.chance(0.1)) order_.push_back(u);
    }
    for (size_t i = order_.size(); i > 1; --i)
      std::swap(order_[i - 1], order_[static_cast<size_t>(draw.below(static_cast<int64_t>(i)))]);
  }

  const std::vector<int>& units() const { return order_; }
  bool has(int unit) const { return std::ranges::find(order_, unit) != order_.end(); }
  /// One of them; there is one.
  int draw_one(Draw& draw) const {
    return order_[static_cast<size_t>(draw.below(static_cast<int64_t>(order_.size())))];
  }

 private:
  int of_;
  std::vector<int> order_;
};

}  // namespace overspill::testing
