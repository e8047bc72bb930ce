// Owners of an engine's state (engine/calls/owners.h), for tests that make one part of the schedule alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/calls/owners.h"
#include "io/memory_store.h"
#include "io/virtual_time.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {

using engine::Owners;

/// Everything on NVMe, which is memory here; small chunks.
engine::Config parts_config();

struct OwnersOptions {
  std::vector<engine::UnitSpec> units = toy_units();
  engine::Config config = parts_config();
  std::string device = "host";
  std::unique_ptr<engine::Communicator> ranks = nullptr;  // null: one rank
  io::Faults faults = {};
  /// The store's transfers end on the thread of whoever polls, when the test says so. Null: on its own.
  std::shared_ptr<io::VirtualTime> time = std::make_shared<io::VirtualTime>();
  std::function<void(engine::Plan&)> change_plan = nullptr;
  std::function<std::unique_ptr<io::Store>(std::unique_ptr<io::Store>)> around_store = nullptr;
};
std::unique_ptr<Owners> make_owners(OwnersOptions options = {});

/// Returns when no transfer is on its way. The engine's mutex is not held.
void let_transfers_end(Owners& owners);

/// Gives a chunk's component this content, in the store. `bytes` are aligned as transfers want it.
void put_in_store(Owners& owners, int32_t chunk, engine::Component component, std::span<std::byte> bytes);

}  // namespace overspill::testing
