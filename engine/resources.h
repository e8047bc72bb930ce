// The resources of an engine of one rank, made from names: what the bindings and the examples run on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/config.h"
#include "engine/partition/model.h"
#include "engine/schedule/context.h"

namespace overspill::engine {

struct ResourceOptions {
  std::string device = "host";      // or "simulated"
  std::string io_backend = "auto";  // "auto", "io_uring", "threads", "memory" (tests: nothing touches a disk)
  uint64_t seed = 0;                // of what is simulated
};

/// Opens a store only where the plan puts something on NVMe. Throws std::invalid_argument on an unknown name,
/// BudgetError, io::StoreError.
Resources make_resources(const std::vector<UnitSpec>& units, const Config& config,
                         const ResourceOptions& options);

}  // namespace overspill::engine
