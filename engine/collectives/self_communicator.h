// The world of one rank.
#pragma once

#include <memory>

#include "engine/collectives/communicator.h"

namespace overspill::engine {

std::unique_ptr<Communicator> make_self_communicator();

}  // namespace overspill::engine
