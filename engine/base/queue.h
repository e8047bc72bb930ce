// A queue of the device that a caller computes on.
#pragma once

namespace overspill::engine {

/// `native` is what native() of a stream of the engine's device returns. The queue outlives the engine and
/// every lease.
struct Queue {
  void* native = nullptr;
  friend bool operator==(const Queue&, const Queue&) = default;
};

}  // namespace overspill::engine
