// Ranks that are processes under PyTorch's launcher: a torch.distributed group as a Communicator
// (docs/ranks.md).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/collectives/communicator.h"

namespace overspill::bindings {

/// `group` is an overspill.ranks.Group, a thin adapter over a torch.distributed group of its own: it posts
/// sends and receives between pairs of ranks, waits for them, and keeps the first failure that any rank
/// declared. libtorch is not linked.
///
/// Memory is lent to PyTorch as tensors over it; nothing is copied. Each rank sends its slice straight to
/// each other one, so the volume is that of a ring. Before memory moves the ranks tell one another which call
/// they make and how large it is. A rank that makes another call, dies, or does not come within the group's
/// timeout is named by a CommunicatorError on every rank; the first one that notices it decides what all say.
///
/// Calls come without the GIL, from any thread, and are made one after the other. Made and destroyed with or
/// without the GIL.
std::unique_ptr<engine::Communicator> make_group_communicator(pybind11::object group);

}  // namespace overspill::bindings
