// A small NCCL for machines without a GPU: the calls that Overspill uses, between the threads of one process,
// on simulated devices' streams. Built as shared objects and opened as the real one is. As the real one it is
// not patient: what is put on a stream comes later, when it is asked for its state; sizes that do not fit are
// never moved.
#pragma once

#include <cstdint>

namespace overspill::engine::fake_nccl {

enum class Fault : int {
  none,
  error_at_init,        // joining fails
  never_joins,          // joining does not end
  error_later,          // the communicator reports an error after the call, and its work does not end
  hangs_on_the_device,  // the work was begun and does not end
  never_begins,         // the call stays in progress
};

/// What the tests reach by dlsym: "fake_nccl_controls".
struct Controls {
  /// From now on: `rank` has the fault in the call that follows `calls` further ones of its own.
  void (*inject)(Fault fault, int rank, int calls);
  /// Communicators that are neither destroyed nor aborted.
  int64_t (*live)();
  /// What a program must not do, so far: sizes that differ between ranks, calls on a dead communicator, one
  /// destroyed without having been finalized.
  int64_t (*misuses)();
  /// Collectives and groups begun so far, by all ranks.
  int64_t (*calls)();
};

}  // namespace overspill::engine::fake_nccl
