// A transfer for a thread that has nothing else to do until the bytes are there.
#pragma once

#include "io/store.h"

namespace overspill::io {

/// Submits `transfer` and returns when it is complete; its `error` says how. Uses its `on_complete` and
/// `context`. Not to be called from a completion, nor with a lock that one takes.
void transfer_now(Store& store, Transfer& transfer);

}  // namespace overspill::io
