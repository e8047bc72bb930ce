// Decides where weights, states and gradients live (the order of claims on the budgets is in plan.h).
#pragma once

#include "engine/base/config.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"

namespace overspill::engine {

/// A plan with all placements and sizes, without its texts for people. Throws BudgetError.
Plan place(const Layout& layout, const Config& config, const DeviceTraits& device);

}  // namespace overspill::engine
