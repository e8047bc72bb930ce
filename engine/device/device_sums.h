// Sums gradients over ranks on the device (Plan::sums_device_bytes). A pool there, or the unit's own memory,
// holds the whole gradients; slices go from device to device, which adds them in rank order. Only this rank's
// sum comes to the host, 1/W of a unit's gradients with W ranks; for units that live on the device nothing
// does.
//
// One thread at a time calls take_in(); the thread of the rounds calls all else. Each side has a stream of
// its own. Errors: kernels::DeviceError, also for earlier work that failed late.
#pragma once

#include <memory>
#include <span>

#include "engine/core/hardware.h"
#include "engine/plan/setup.h"
#include "kernels/device_kernels.h"

namespace overspill::engine {

class DeviceSums {
 public:
  DeviceSums(const Setup& setup, Hardware& hardware);
  ~DeviceSums();  // waits for what is under way
  DeviceSums(const DeviceSums&) = delete;
  DeviceSums& operator=(const DeviceSums&) = delete;
  /// Waits for what was started.
  void settle() noexcept;

  bool used() const { return kernels_ != nullptr; }
  /// Device memory: pool() for pooled gradients until they are summed, exchange() for one chunk's slices as
  /// they arrive.
  std::byte* pool() const { return memory_.data(); }
  std::span<std::byte> exchange() const;

  /// Makes later take_in() calls wait for the event.
  void arrive_after(const kernels::Event& event) { arrivals_->wait(event); }
  /// Takes elements in at `to`, in the pool or a unit's own memory: `first` replaces, otherwise they are
  /// added. Reads device memory once `ready` is reached; done when the returned event is reached.
  kernels::Event take_in(optim::Element from_type, const std::byte* from, optim::Element to_type,
                         std::byte* to, int64_t elements, bool first, const kernels::Event& ready);
  /// The same from host memory; done on return.
  void take_in(optim::Element from_type, const std::byte* from, optim::Element to_type, std::byte* to,
               int64_t elements, bool first);

  /// Sets the bytes to zero; done on return.
  void clear(std::byte* data, int64_t bytes);
  /// Adds one rank's part to the fp32 sum of one chunk; `first` replaces the sum.
  void add(optim::Element type, const std::byte* part, int64_t elements, bool first);
  /// Copies the sum to pinned memory; done on return.
  void fetch(std::span<float> to);
  /// Writes the sum times `factor` to device memory, once `ready` is reached: `first` replaces, otherwise it
  /// is added. Done on return.
  void take_mean(float factor, optim::Element type, std::byte* to, int64_t elements, bool first,
                 const kernels::Event& ready);

 private:
  int64_t part_bytes() const { return setup_.plan.sums_part_bytes; }
  std::byte* sum() const { return exchange().data() + exchange().size(); }

  const Setup& setup_;
  kernels::DeviceKernels* kernels_ = nullptr;
  kernels::DeviceMemory memory_;  // the pool, then parts: each rank's, the sum, a piece from the host
  std::unique_ptr<kernels::Stream> arrivals_;
  std::unique_ptr<kernels::Stream> sums_;
};

}  // namespace overspill::engine
