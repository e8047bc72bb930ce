// What gradients in a device's memory have in common, whether their units live there (device_units.h),
// several ranks' sums are made there (device_sums.h) or several micro-batches' (device_accumulators.h).
#pragma once

#include <span>

#include "cpu_optim/format.h"
#include "kernels/device_kernels.h"

namespace overspill::engine {

/// Elements of host memory come in at `to` on the device, as DeviceKernels::take_in does, by way of `piece`
/// there. Once an event recorded later is done, `from` and `piece` are free.
void take_in_from_host(kernels::DeviceKernels& kernels, kernels::Stream& stream, std::span<std::byte> piece,
                       optim::Element from_type, const std::byte* from, optim::Element to_type, std::byte* to,
                       int64_t elements, bool first);

/// Waits for all that was put on the stream (null: nothing). Where the device has failed, nothing uses its
/// memory any more, and who asks for the work is told.
void settle(kernels::Stream* stream) noexcept;

}  // namespace overspill::engine
