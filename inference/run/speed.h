// How fast the threads of a team read memory.
#pragma once

#include <cstddef>
#include <span>

#include "inference/run/team.h"

namespace overspill::inference {

/// Bytes a second that the team reads of `memory`, each thread its share, as when it multiplies. Memory that
/// is larger than the caches gives the speed at which a token's weights can be read at most. Returns 0 for
/// less than a cache line for each thread.
double read_bytes_per_second(Team& team, std::span<const std::byte> memory);

}  // namespace overspill::inference
