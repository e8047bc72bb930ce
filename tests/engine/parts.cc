#include "tests/engine/parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>

#include "engine/collectives/self_communicator.h"
#include "io/memory_store.h"

namespace overspill::testing {

engine::Config parts_config() {
  engine::Config config;
  config.nvme = {"/nowhere"};  // the store is in memory
  config.threads = 1;
  config.chunk_elements = 4096;
  config.prefetch_units = 2;
  config.placement = engine::Placement::nvme;
  config.host_budget_bytes = 64 << 20;
  return config;
}

std::unique_ptr<Owners> make_owners(OwnersOptions options) {
  if (options.ranks == nullptr) options.ranks = engine::make_self_communicator();
  engine::Resources resources;
  resources.device = engine::make_device(options.device);
  resources.executor = optim::make_executor(options.config.threads);
  engine::Layout layout =
      engine::make_layout(options.units, options.config.chunk_elements, options.ranks->rank(),
                          options.ranks->world(), options.config.stage);
  engine::Plan plan = make_plan(layout, options.config, traits_of(*resources.device, *options.ranks));
  if (options.change_plan) options.change_plan(plan);
  resources.ranks.communicator = std::move(options.ranks);
  resources.store =
      io::make_memory_store(64 << 20, options.faults, io::kChecksumBlockBytes, std::move(options.time));
  if (options.around_store) resources.store = options.around_store(std::move(resources.store));
  resources.store->reserve(32 << 20);
  return std::make_unique<Owners>(std::move(layout), std::move(plan), std::move(options.config),
                                  std::move(resources));
}

void let_transfers_end(Owners& owners) {
  owners.core.store->drain();
}

void put_in_store(Owners& owners, int32_t chunk, engine::Component component, std::span<std::byte> bytes) {
  io::Transfer transfer;
  transfer.kind = io::Transfer::Kind::write;
  transfer.extent = owners.core.store->allocate(std::ssize(bytes));
  transfer.memory = bytes.data();
  transfer.on_complete = [](io::Transfer&) noexcept {};
  owners.core.store->submit(transfer);
  let_transfers_end(owners);
  ASSERT_FALSE(transfer.error) << transfer.error->message();
  const MutexLock lock(owners.core.mutex());
  owners.model.chunks[chunk].extents[static_cast<size_t>(component)] = transfer.extent;
}

}  // namespace overspill::testing
