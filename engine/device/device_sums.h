// Gradients of several ranks that are summed on the device (Plan::sums_device_bytes): until then they lie
// whole there, in a pool or in the unit's own memory, slices go from device to device, and are added there in
// rank order. What comes to the host is this rank's sum alone, W times less than the gradients of a unit over
// W ranks; of units that live on the device nothing does.
//
// take_in() is for whoever brings gradients, one thread at a time; all else for the thread of the rounds.
// Each has a stream of its own. Errors: kernels::DeviceError, also of what was found late.
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
  /// Device memory: of units' gradients until they are summed, where they are pooled; of one chunk's slices
  /// as they come.
  std::byte* pool() const { return memory_.data(); }
  std::span<std::byte> exchange() const;

  /// What comes in later does so after the event.
  void arrive_after(const kernels::Event& event) { arrivals_->wait(event); }
  /// Elements come in at `to`, in the pool or a unit's own memory: in place of what is there, or (not
  /// `first`) added. From device memory, once `ready` is reached: it is there when the event is done.
  kernels::Event take_in(optim::Element from_type, const std::byte* from, optim::Element to_type,
                         std::byte* to, int64_t elements, bool first, const kernels::Event& ready);
  /// From host memory: it is there on return.
  void take_in(optim::Element from_type, const std::byte* from, optim::Element to_type, std::byte* to,
               int64_t elements, bool first);

  /// To zero; it is on return.
  void clear(std::byte* data, int64_t bytes);
  /// Adds one rank's part to the sum in fp32 of one chunk; the first one replaces it.
  void add(optim::Element type, const std::byte* part, int64_t elements, bool first);
  /// The sum, to pinned memory; it is there on return.
  void fetch(std::span<float> to);
  /// The sum times `factor`, to device memory, once `ready` is reached: in place of what is there, or (not
  /// `first`) added. It is there on return.
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
