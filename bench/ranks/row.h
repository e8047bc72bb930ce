// What a row of bench-ranks says, measured by the ranks together, whatever transport is between them.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/collectives/communicator.h"

namespace overspill::bench {

/// Another communicator of the same ranks, each time it is called; all ranks call it as often.
using Join = std::function<std::unique_ptr<engine::Communicator>()>;
inline constexpr int kJoins = 4;  // of one row

/// Collective. A line of JSON, the same on all ranks but for what each sends and holds: bytes a parameter and
/// bytes sent of a deep model in bf16; of a shallow one in fp32 and in bf16 the loss of each step, its
/// largest difference from one process on the whole batch, relative, and a digest of all weights and states
/// at the end.
std::string measure_row(const char* transport, int stage, const Join& join);

}  // namespace overspill::bench
