// Sums gradients over micro-batches on the device, for units that live on the host (Plan::summed_on_device).
// Only the sum crosses the link, after the last micro-batch. Until then the host's copy of a sum is out of
// date; code that reads or changes it first calls GradientIntake::finish. If the host changes its copy
// afterwards, the sum here no longer counts, and later gradients of the step are added on the host.
//
// On the host each micro-batch would cost a worker's pass over 10 bytes per element; here all of them cross
// the link once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/core/hardware.h"
#include "engine/device/device_units.h"
#include "engine/plan/setup.h"
#include "kernels/device_kernels.h"

namespace overspill::engine {

/// One thread at a time, except methods that need the engine's mutex. Errors: kernels::DeviceError, also for
/// earlier work that failed late.
class DeviceAccumulators {
 public:
  DeviceAccumulators(const Setup& setup, Hardware& hardware);
  ~DeviceAccumulators();  // waits for what is under way
  DeviceAccumulators(const DeviceAccumulators&) = delete;
  DeviceAccumulators& operator=(const DeviceAccumulators&) = delete;
  /// Waits for what was started.
  void settle() noexcept;

  /// Whether the gradient is added up here: it is the first of a step, or its sum is here. From now on the
  /// sum is ahead of the host's.
  bool takes(const DeviceUnits::Arrival& arrival) REQUIRES(engine_mutex);
  /// Adds a gradient for which takes() was true, from device memory, once `ready` is reached: it is in the
  /// sum when the event is reached.
  kernels::Event take_in(const DeviceUnits::Arrival& arrival, const std::byte* data,
                         const kernels::Event& ready);
  /// The sum, in fp32, at the segment's first element.
  const std::byte* sum(int32_t unit, int32_t segment) const;
  kernels::Stream& stream() { return *stream_; }

  /// Whether the host's copy is out of date, for any segment of the unit; for the segment.
  bool ahead(int32_t unit) const REQUIRES(engine_mutex);
  bool ahead(int32_t unit, int32_t segment) const REQUIRES(engine_mutex) {
    return !of_[unit].empty() && of_[unit][segment] == Sum::ahead;
  }
  /// Says that the host has the sum, or will have it before anyone reads it.
  void brought_down(int32_t unit, int32_t segment) REQUIRES(engine_mutex) { of_[unit][segment] = Sum::same; }
  /// Says that the host's copy changes, or is thrown away.
  void forget(int32_t unit, int32_t segment) REQUIRES(engine_mutex) {
    if (!of_[unit].empty()) of_[unit][segment] = Sum::none;
  }

 private:
  enum class Sum : uint8_t {
    none,   // what lies here is no gradient of this step
    ahead,  // the host lacks something of it
    same,   // the host has it
  };

  const Setup& setup_;
  Hardware& hardware_;
  kernels::DeviceMemory memory_;
  std::vector<std::byte*> sums_;  // by unit
  /// By unit and segment; empty: the unit's are summed on the host.
  std::vector<std::vector<Sum>> of_ GUARDED_BY(engine_mutex);
  std::unique_ptr<kernels::Stream> stream_;
};

}  // namespace overspill::engine
