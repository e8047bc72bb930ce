// Sums in rank order, for transports that have only an all-gather.
#pragma once

#include <span>
#include <vector>

#include "engine/collectives/communicator.h"

namespace overspill::engine {

/// What Communicator::all_reduce_sum promises, by one all_gather. `scratch` is kept for the next call.
void sum_in_rank_order(Communicator& ranks, std::span<double> values, std::vector<double>& scratch);

}  // namespace overspill::engine
