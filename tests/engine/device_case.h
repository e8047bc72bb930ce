// The toy model on a device with little room, for tests of what a framework does there.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "kernels/device.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {

inline constexpr int64_t kThreeUnits = 92 << 10;  // what the device must have, and not what all six take

struct DeviceCase {
  engine::Placement placement = engine::Placement::host;
  std::string device = "simulated";
  int micro_batches = 1;
  bool poison = false;
  int64_t device_budget_bytes = kThreeUnits;
  bool speculate = false;
};

inline engine::Config device_config(const DeviceCase& c) {
  engine::Config config;
  config.host_budget_bytes = 64 << 20;
  config.device_budget_bytes = c.device_budget_bytes;
  config.nvme = {"/nowhere"};  // the store is in memory
  config.gradient_accumulation = c.micro_batches;
  config.max_grad_norm = c.speculate ? 1e9 : 1.0;
  config.speculate = c.speculate;
  config.prefetch_units = 2;
  config.chunk_elements = 4096;
  config.placement = c.placement;
  config.poison = c.poison;
  return config;
}

/// `device` becomes the engine's.
inline std::unique_ptr<engine::Engine> device_engine(const DeviceCase& c,
                                                     std::shared_ptr<kernels::Device>& device) {
  const engine::Config config = device_config(c);
  engine::ResourceOptions options;
  options.device = c.device;
  options.io_backend = "memory";
  options.seed = 3;
  engine::Resources resources = make_resources(toy_units(), config, options);
  device = resources.device;
  auto made = std::make_unique<engine::Engine>(toy_units(), config, std::move(resources));
  toy_load(*made);
  return made;
}

}  // namespace overspill::testing
