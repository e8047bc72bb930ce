// A short measurement of several paths, for the first shares of a store.
#pragma once

#include <chrono>
#include <span>
#include <vector>

#include "io/balance.h"
#include "io/job_folder.h"

namespace overspill::io {

/// Writes, then reads, a nameless file in each folder for about `phase` each, all folders at once, since that
/// is how they will work and they may share a bus. A speed of 0: that path could not be measured (no room);
/// never throws for it.
std::vector<PathSpeed> measure_speeds(std::span<const JobFolder* const> folders,
                                      std::chrono::milliseconds phase);

}  // namespace overspill::io
