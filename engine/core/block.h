#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/core/engine_mutex.h"
#include "kernels/device.h"

namespace overspill::engine {

/// Memory of one gathered unit. Lives on, as an orphan, when its unit was updated while somebody still looks
/// at the old weights.
struct Block {
  int32_t unit GUARDED_BY(engine_mutex) = -1;
  int32_t leases GUARDED_BY(engine_mutex) = 0;
  bool orphan GUARDED_BY(engine_mutex) = false;
  int32_t pins GUARDED_BY(engine_mutex) = 0;          // its shard is being sent
  int32_t arriving GUARDED_BY(engine_mutex) = 0;      // chunks not yet in
  int64_t host_offset GUARDED_BY(engine_mutex) = -1;  // in the host arena; -1: none
  /// In the device arena; -1: the host memory is the device's.
  int64_t device_offset GUARDED_BY(engine_mutex) = -1;
  /// All ranks' shards where they meet there, else this rank's.
  std::byte* host GUARDED_BY(engine_mutex) = nullptr;
  std::byte* shard GUARDED_BY(engine_mutex) = nullptr;   // this rank's, on the host
  std::byte* device GUARDED_BY(engine_mutex) = nullptr;  // what is leased
  kernels::Event copied GUARDED_BY(engine_mutex);        // host -> device done
  /// On callers' queues: done with the device memory.
  std::vector<kernels::Event> uses GUARDED_BY(engine_mutex);
  /// Callers' queues while there are leases; may be given more work.
  std::vector<kernels::Stream*> users GUARDED_BY(engine_mutex);
};

}  // namespace overspill::engine
