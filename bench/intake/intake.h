// What a gradient costs between its arrival and the update: `make bench-intake`.
#pragma once

#include <cstdint>

namespace overspill::bench {

constexpr int kThreads = 2;

/// Of gradients that are in host memory: seconds of taking all of them in, once for each micro-batch, beside
/// loops that only read and write the same bytes with as many threads, in turn; medians.
struct HostIntake {
  int64_t micro_batches = 1;
  double bytes = 0;  // that have to be moved
  double seconds = 0;
  double limit_seconds = 0;
  double ratio = 0;  // of the limit's time to ours, pair by pair
};
HostIntake host_intake(int64_t micro_batches, int rounds);

/// Of a device behind a link with a clock (simulated): a model as a 7 B Llama, a fiftieth as wide in bytes,
/// over a link a fiftieth as fast as PCIe 4's 25 GB/s, so that each layer's copies take as long as theirs;
/// compute is the clock's, of 16,384 tokens a micro-batch.
struct DeviceIntake {
  int64_t micro_batches = 1;
  bool sums_there = false;  // the device's budget takes them
  double step_seconds = 0;  // medians
  double tail_seconds = 0;  // from the end of backward on the device to the end of step()
};
DeviceIntake device_intake(int64_t micro_batches, bool sums_there, int steps);

}  // namespace overspill::bench
