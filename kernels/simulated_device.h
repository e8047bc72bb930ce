// An accelerator made of threads, for tests: every missing wait shows, on any machine.
//
// Memory has its own addresses, is filled with 0xFF (NaN in every float format) when allocated, when poisoned
// and when freed. Each stream is a thread that does its copies after seeded random delays. A copy reads its
// source when it runs, not when it is submitted, so a staging buffer reused too early shows as well. A copy
// that touches memory outside a live allocation is not done: it fails its stream, and the stream's later
// events throw DeviceError from wait(). Freed blocks stay in quarantine: a write into one is found when it
// leaves. Copies from and to host memory that was not pinned are done, and counted.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "kernels/device.h"

namespace overspill::kernels {

struct SimulatedDeviceOptions {
  uint64_t seed = 1;
  std::chrono::microseconds delay_min{0};  // of each copy
  std::chrono::microseconds delay_max{200};
  int64_t link_bytes_per_s = 0;  // of each stream, both ways; a copy takes so long at least. 0: no limit
  int64_t memory_bytes = int64_t{1} << 40;       // beyond it allocate() throws std::bad_alloc
  int64_t quarantine_bytes = int64_t{64} << 20;  // freed memory kept to find writes after free
  bool poison = true;                            // whether Device::poison fills
  std::optional<int> numa_node = std::nullopt;   // next to it
};

/// What native() of a simulated stream points at: work put here is done in the stream's order, by its thread,
/// and may read and write device memory as a kernel would. Skipped when the stream has failed.
class SimulatedQueue {
 public:
  virtual ~SimulatedQueue() = default;
  virtual void enqueue(std::function<void()> work) = 0;
};

/// All methods are thread-safe. The destructor aborts the process when writes after free were found and
/// nobody was told.
class SimulatedDevice : public Device {
 public:
  /// Looks through everything freed and kept. Throws DeviceError on the first write after free or past the
  /// end of a block, or a block freed while a copy used it; throws once for each.
  virtual void verify_freed_memory() = 0;
  virtual int64_t used_bytes() const = 0;  // allocated and not freed
  /// Copies so far whose host side did not lie in one range that pin_host() had pinned.
  virtual int64_t unpinned_copies() const = 0;
};

std::unique_ptr<SimulatedDevice> make_simulated_device(const SimulatedDeviceOptions& options = {});

}  // namespace overspill::kernels
