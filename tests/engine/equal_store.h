// A store whose paths count as equally fast.
#pragma once

#include <memory>
#include <vector>

#include "engine/base/config.h"
#include "io/file_store.h"

namespace overspill::testing {

/// Nothing is measured: which path gets what must not depend on this machine's disks.
inline std::unique_ptr<io::Store> equally_fast_store(const engine::Config& config) {
  return io::make_file_store({.paths = config.nvme,
                              .job = config.job,
                              .backend = io::FileStoreOptions::Backend::threads,
                              .speeds = std::vector<io::PathSpeed>(config.nvme.size(), {1e9, 1e9}),
                              .patience = {},
                              .result_hook = {}});
}

}  // namespace overspill::testing
