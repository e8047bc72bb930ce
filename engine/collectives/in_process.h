// Ranks that are threads of one process, for tests of everything that has more than one rank.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "engine/collectives/communicator.h"

namespace overspill::engine {

/// One communicator per rank; each may outlive the others. A rank ends the world if it joins a call later
/// than `timeout` after another rank, makes a different call, or destroys its communicator. Then every rank
/// gets CommunicatorError, in this and later calls.
std::vector<std::unique_ptr<Communicator>> make_in_process_world(int ranks,
                                                                 std::chrono::milliseconds timeout);

}  // namespace overspill::engine
