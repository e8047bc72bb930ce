// A run that goes on from a checkpoint goes on in the slabs that it has (io/taking_over.h).
#pragma once

#include <vector>

#include "engine/checkpoint/rank_part.h"
#include "engine/plan/setup.h"
#include "io/store.h"

namespace overspill::engine {

/// Takes over the slabs of the checkpoints that Config::take_over names: those of rank N of the run that made
/// them go to rank N modulo the number of ranks. Returns what the checkpoints hold of them, pinned. Says on
/// stderr which checkpoints cannot be read and which slabs are left, and why: the store then takes new room
/// in their place. Throws io::StoreError where a disk does not answer.
std::vector<RankPart::Pinned> take_over(const Setup& setup, io::Store& store);

}  // namespace overspill::engine
