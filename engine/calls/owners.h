// The owners of an engine's state, in the order in which they are built: what its parts are given. Beyond
// engine/ nobody sees this but tests, which make one part without an engine.
#pragma once

#include <utility>

#include "engine/base/config.h"
#include "engine/collectives/rank_groups.h"
#include "engine/core/core.h"
#include "engine/core/demand.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"
#include "engine/plan/setup.h"
#include "engine/resources.h"

namespace overspill::engine {

struct Owners {
  /// Throws BudgetError, kernels::DeviceError.
  Owners(Layout layout, Plan plan, Config config, Resources resources)
      : setup{std::move(layout), std::move(plan), std::move(config),
              traits_of(*resources.device, *resources.ranks.communicator)},
        hardware(std::move(resources.device), std::move(resources.executor), setup.config.host_budget_bytes),
        ranks(std::move(resources.ranks)),
        core(setup.layout.units.size(), std::move(resources.store), std::move(resources.watch)),
        model(setup, hardware),
        demand(setup.layout.units.size()) {}

  const Setup setup;
  Hardware hardware;
  RankGroups ranks;
  Core core;
  ModelStates model;
  Demand demand;
};

}  // namespace overspill::engine
