// What every part of the schedule shares: the monitor, the store, the measurements, and waits during which
// the caller's thread moves transfers of the store on.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "engine/core/monitor.h"
#include "engine/core/store_gate.h"
#include "engine/telemetry/journal.h"
#include "engine/telemetry/report.h"
#include "io/stall_watch.h"
#include "io/store.h"
#include "kernels/clock.h"
#include "kernels/device.h"

namespace overspill::engine {

struct ScheduleStats {
  int64_t updates = 0;  // chunks
  int64_t guesses_taken = 0;
  int64_t guesses_dropped = 0;
  int64_t gathers = 0;  // units that began to fill a block
  int64_t wait_ns = 0;  // callers waited for weights or updates
};

class Core final : public Monitor {
 public:
  /// `store_in` and `watch` as for StoreGate. `units`: how many the model has.
  Core(size_t units, std::unique_ptr<io::Store> store_in, std::shared_ptr<io::StallWatch> watch)
      : meter(kernels::steady_now_ns, units),
        store(*this, meter, journal, std::move(store_in), std::move(watch)) {}

  /// Waits until done() is true and counts the time for the report, under `cause`; `unit` goes into the
  /// journal. Returns the nanoseconds. Throws EngineFailed when the engine fails meanwhile.
  template <class Done>
  int64_t wait(Done done, Cause cause, int32_t unit = -1) MAY_RELEASE(engine_mutex);
  /// Waits for the device, without the mutex. Throws kernels::DeviceError.
  void wait_for(const kernels::Event& event) MAY_RELEASE(engine_mutex) {
    const Unlocked unlocked(mutex());
    event.wait();
  }

  ScheduleStats stats GUARDED_BY(engine_mutex);
  Journal journal GUARDED_BY(engine_mutex);
  StepMeter meter GUARDED_BY(engine_mutex);
  uint64_t progress GUARDED_BY(engine_mutex) = 0;  // calls so far: shows that this rank's caller is alive
  StoreGate store;
};

template <class Done>
int64_t Core::wait(Done done, Cause cause, int32_t unit) {
  check();
  if (done()) return 0;
  const int64_t start = kernels::steady_now_ns();
  journal.note(Happening::waiting, unit, -1, static_cast<int32_t>(cause));
  meter.begin(Activity::wait);
  const auto over = [&]() REQUIRES(engine_mutex) { return !failure.empty() || done(); };
  while (!over() && store.poll()) {
  }
  while (!over()) changed.wait(mutex());
  journal.note(Happening::resumed, unit);
  meter.end(Activity::wait);
  const int64_t waited_ns = kernels::steady_now_ns() - start;
  stats.wait_ns += waited_ns;
  meter.waited(cause, waited_ns);
  check();
  return waited_ns;
}

}  // namespace overspill::engine
