// The resources of an engine, made from names: what the bindings and the examples run on.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/config.h"
#include "engine/partition/model.h"
#include "engine/schedule/context.h"
#include "io/patience.h"

namespace overspill::engine {

struct ResourceOptions {
  std::string device = "host";      // "host", "cuda", "cuda:1" and so on, "simulated" (tests)
  std::string io_backend = "auto";  // "auto", "io_uring", "threads", "memory" (tests: nothing touches a disk)
  uint64_t seed = 0;                // of what is simulated
  std::shared_ptr<kernels::Device> given_device = nullptr;  // in place of `device`
  io::Patience patience{};  // with disks; Config::io_deadline_ms counts over its own
};

/// Of a name as in ResourceOptions. Throws std::invalid_argument on another one, kernels::DeviceError where
/// the device is missing.
std::unique_ptr<kernels::Device> make_device(const std::string& name, uint64_t seed = 0);

/// Opens a store only where the plan puts something on NVMe. Throws std::invalid_argument on an unknown name,
/// kernels::DeviceError where the device is missing, BudgetError, io::StoreError; the other ranks are told.
/// `ranks` is this rank's place among several; null: there is one.
Resources make_resources(const std::vector<UnitSpec>& units, const Config& config,
                         const ResourceOptions& options, std::unique_ptr<Communicator> ranks = nullptr);

}  // namespace overspill::engine
