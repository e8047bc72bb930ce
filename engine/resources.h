// The resources of an engine, made from names: what the bindings and the examples run on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu_optim/executor.h"
#include "engine/base/config.h"
#include "engine/collectives/rank_groups.h"
#include "engine/partition/model.h"
#include "io/patience.h"
#include "io/stall_watch.h"
#include "io/store.h"
#include "kernels/device.h"

namespace overspill::engine {

/// What an engine runs on. It owns all but the device and the transports. `store` may be null where the plan
/// puts nothing on NVMe.
struct Resources {
  std::shared_ptr<kernels::Device> device;
  RankGroups ranks;
  std::unique_ptr<optim::Executor> executor;
  std::unique_ptr<io::Store> store;
  /// Watches the disk calls of checkpoints: the store's own watch, where it has one. Null: nothing is
  /// watched.
  std::shared_ptr<io::StallWatch> watch = nullptr;
};

struct ResourceOptions {
  std::string device = "host";      // "host", "cuda", "cuda:1" and so on, "simulated" (tests)
  std::string io_backend = "auto";  // "auto", "io_uring", "threads", "memory" (tests: nothing touches a disk)
  uint64_t seed = 0;                // for the simulated device and the store in memory
  std::shared_ptr<kernels::Device> given_device = nullptr;  // in place of `device`
  io::Patience patience{};  // with disks; Config::io_deadline_ms, where set, replaces its deadline
};

/// Makes the device that ResourceOptions::device names. Throws std::invalid_argument for any other name,
/// kernels::DeviceError where the device is missing.
std::unique_ptr<kernels::Device> make_device(const std::string& name, uint64_t seed = 0);

/// Opens a store only where the plan puts something on NVMe. Throws std::invalid_argument on an unknown name,
/// kernels::DeviceError where the device is missing, BudgetError, io::StoreError; the other ranks are told.
/// `ranks` is this rank's place among several; null: there is one.
Resources make_resources(const std::vector<UnitSpec>& units, const Config& config,
                         const ResourceOptions& options, std::unique_ptr<Communicator> ranks = nullptr);

}  // namespace overspill::engine
