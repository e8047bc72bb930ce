// What a plan tells people: Plan::text(), and what it lists.
#pragma once

#include <vector>

#include "engine/plan/plan.h"

namespace overspill::engine {

/// Parameters that are held alike, in the model's order.
std::vector<Plan::Holding> holdings_of(const Layout& layout);

}  // namespace overspill::engine
