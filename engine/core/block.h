// The memory of a gathered unit: what the gatherer fills and a lease holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/core/engine_mutex.h"
#include "kernels/device.h"

namespace overspill::engine {

/// Memory of one gathered unit. If the unit is updated while a lease still uses the old weights, the block
/// lives on as an orphan until that lease ends.
struct Block {
  int32_t unit GUARDED_BY(engine_mutex) = -1;
  int32_t leases GUARDED_BY(engine_mutex) = 0;
  bool orphan GUARDED_BY(engine_mutex) = false;
  int32_t pins GUARDED_BY(engine_mutex) = 0;          // its shard is being sent, or copied
  int32_t arriving GUARDED_BY(engine_mutex) = 0;      // chunks not yet in
  int64_t host_offset GUARDED_BY(engine_mutex) = -1;  // in the host arena; -1: none
  /// In the device arena; -1: the device uses the host memory.
  int64_t device_offset GUARDED_BY(engine_mutex) = -1;
  /// All ranks' shards where they meet in host memory, else this rank's.
  std::byte* host GUARDED_BY(engine_mutex) = nullptr;
  std::byte* shard GUARDED_BY(engine_mutex) = nullptr;   // this rank's, on the host
  std::byte* device GUARDED_BY(engine_mutex) = nullptr;  // what is leased
  kernels::Event copied GUARDED_BY(engine_mutex);        // host -> device done
  /// Reached on callers' queues when they no longer use the device memory.
  std::vector<kernels::Event> uses GUARDED_BY(engine_mutex);
  /// Callers' queues that the leases are for: they may be given more work that uses the block.
  std::vector<kernels::Stream*> users GUARDED_BY(engine_mutex);
};

}  // namespace overspill::engine
