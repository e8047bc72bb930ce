// The updates of a step as a simulation sees them (simulate.h): neighbours of a unit are taken together where
// there are many chunks.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/base/config.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"

namespace overspill::engine {

/// Chunks of a unit that are treated alike, one after the other.
struct UpdateJob {
  int32_t unit = 0;
  bool in_ring = false;
  bool may_guess = false;
  double elements = 0;
  double read = 0;      // states, and weights that are not at home
  double written = 0;   // the same
  double gradient = 0;  // spilled
};

/// Of all chunks that the CPU updates, in the order of the layout. `grain`: chunks that are taken together at
/// most.
std::vector<UpdateJob> jobs_of(const Layout& layout, const Plan& plan, const Config& config, int64_t grain);

}  // namespace overspill::engine
