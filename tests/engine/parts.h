// The owners of an engine's state, without an engine: for tests that make one part of the schedule alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/collectives/rank_groups.h"
#include "engine/core/core.h"
#include "engine/core/demand.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/plan/setup.h"
#include "engine/resources.h"
#include "io/virtual_time.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {

struct Owners {
  Owners(engine::Layout layout, engine::Plan plan, engine::Config config, engine::Resources resources)
      : setup{std::move(layout), std::move(plan), std::move(config),
              traits_of(*resources.device, *resources.ranks.communicator)},
        hardware(std::move(resources.device), std::move(resources.executor), setup.config.host_budget_bytes),
        ranks(std::move(resources.ranks)),
        core(setup.layout.units.size(), std::move(resources.store), std::move(resources.watch)),
        model(setup, hardware),
        demand(setup.layout.units.size()) {}

  const engine::Setup setup;
  engine::Hardware hardware;
  engine::RankGroups ranks;
  engine::Core core;
  engine::ModelStates model;
  engine::Demand demand;
};

/// Everything on NVMe, which is memory here; small chunks.
engine::Config parts_config();

struct OwnersOptions {
  std::vector<engine::UnitSpec> units = toy_units();
  engine::Config config = parts_config();
  std::string device = "host";
  std::unique_ptr<engine::Communicator> ranks = nullptr;  // null: one rank
  /// The store's transfers end on the thread of whoever polls, when the test says so. Null: on its own.
  std::shared_ptr<io::VirtualTime> time = std::make_shared<io::VirtualTime>();
  std::function<void(engine::Plan&)> change_plan = nullptr;
};
std::unique_ptr<Owners> make_owners(OwnersOptions options = {});

/// Returns when no transfer is on its way. The engine's mutex is not held.
void let_transfers_end(Owners& owners);

/// Gives a chunk's component this content, in the store. `bytes` are aligned as transfers want it.
void put_in_store(Owners& owners, int32_t chunk, engine::Component component, std::span<std::byte> bytes);

}  // namespace overspill::testing
