#pragma once

#include <string_view>

namespace overspill::testing {

/// Trains under mpirun until rank 1 ends ("engine-dies") or its caller waits for ever ("engine-hangs") at a
/// call that the seed draws. The exit code of this rank.
int engine_ends_badly(std::string_view how, unsigned long seed);

}  // namespace overspill::testing
