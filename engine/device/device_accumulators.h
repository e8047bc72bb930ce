// Sums of several micro-batches' gradients on the device, of units that live on the host
// (Plan::summed_on_device): each gradient is added up there, and the sum alone crosses the link, after the
// last micro-batch. The host's copy of a sum is behind until then; whoever wants to read or change it brings
// it down first (GradientIntake::finish). What the host changes afterwards is no longer what lies here, and
// later gradients of the step are added there.
//
// Several micro-batches on the host cost a worker's pass each, over 10 bytes an element; here the link is
// crossed once for all of them.
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

/// One thread at a time, but for what needs the engine's mutex. Errors: kernels::DeviceError, also of what
/// was found late.
class DeviceAccumulators {
 public:
  DeviceAccumulators(const Setup& setup, Hardware& hardware);
  ~DeviceAccumulators();  // waits for what is under way
  DeviceAccumulators(const DeviceAccumulators&) = delete;
  DeviceAccumulators& operator=(const DeviceAccumulators&) = delete;
  /// Waits for what was started.
  void settle() noexcept;

  /// Whether the gradient is added up here: the first of a step, or one whose sum is here. The sum is ahead
  /// of the host's from now on.
  bool takes(const DeviceUnits::Arrival& arrival) REQUIRES(engine_mutex);
  /// Adds a gradient that takes() said yes to, from device memory, once `ready` is reached: it is in the sum
  /// when the event is done.
  kernels::Event take_in(const DeviceUnits::Arrival& arrival, const std::byte* data,
                         const kernels::Event& ready);
  /// Of the segment's first element, in fp32.
  const std::byte* sum(int32_t unit, int32_t segment) const;
  kernels::Stream& stream() { return *stream_; }

  /// The host's copy is behind, of some segment of the unit; of the segment.
  bool ahead(int32_t unit) const REQUIRES(engine_mutex);
  bool ahead(int32_t unit, int32_t segment) const REQUIRES(engine_mutex) {
    return !of_[unit].empty() && of_[unit][segment] == Sum::ahead;
  }
  /// The host has, or is about to have before anyone reads it, what is here.
  void brought_down(int32_t unit, int32_t segment) REQUIRES(engine_mutex) { of_[unit][segment] = Sum::same; }
  /// The host's copy changes, or is thrown away.
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
