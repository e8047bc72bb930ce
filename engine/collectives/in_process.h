// Ranks that are threads of one process, for tests of everything that has more than one rank.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "engine/collectives/communicator.h"

namespace overspill::engine {

/// One communicator a rank; each may outlive the others. A rank that has not joined a call `timeout` after
/// another did, whose communicator was destroyed, or that makes another call, ends the world:
/// CommunicatorError on every rank, then and later.
std::vector<std::unique_ptr<Communicator>> make_in_process_world(int ranks,
                                                                 std::chrono::milliseconds timeout);

}  // namespace overspill::engine
