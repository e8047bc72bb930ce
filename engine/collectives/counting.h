// Counts what a rank sends and receives: a Communicator around another.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "engine/collectives/communicator.h"

namespace overspill::engine {

/// Bytes between this rank and others, whatever route the transport uses. A slice that goes to all ranks
/// (all-gather) counts once for each of them.
struct Traffic {
  struct Kind {
    std::atomic<int64_t> calls = 0;
    std::atomic<int64_t> sent_bytes = 0;
    std::atomic<int64_t> received_bytes = 0;
  };
  Kind gathered;    // all_gather
  Kind transposed;  // all_to_all
  Kind exchanged;   // exchange
  Kind reduced;     // all_reduce_sum
  Kind scattered;   // reduce_scatter_sum, as in a ring
  Kind barriers;
};

/// `traffic` may be read at any time, also after the communicator is gone.
std::unique_ptr<Communicator> count_traffic(std::unique_ptr<Communicator> ranks,
                                            std::shared_ptr<Traffic> traffic);

}  // namespace overspill::engine
