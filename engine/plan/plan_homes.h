// Which tier holds each unit, as a plan has decided it: for people and scripts.
#pragma once

#include <vector>

#include "engine/plan/plan.h"

namespace overspill::engine {

/// By unit. Over all units, host and NVMe bytes are those of the plan's weights and states.
std::vector<Plan::UnitHome> homes_of(const Layout& layout, const Plan& plan, const DeviceTraits& device);

}  // namespace overspill::engine
