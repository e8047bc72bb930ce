// Helpers for gradients in device memory: of units that live there (device_units.h), in sums over ranks
// (device_sums.h) or over micro-batches (device_accumulators.h).
#pragma once

#include <span>

#include "cpu_optim/format.h"
#include "kernels/device_kernels.h"

namespace overspill::engine {

/// Takes elements from host memory in at `to` on the device, as DeviceKernels::take_in does, through the
/// device buffer `piece`. `from` and `piece` are free once an event recorded afterwards is reached.
void take_in_from_host(kernels::DeviceKernels& kernels, kernels::Stream& stream, std::span<std::byte> piece,
                       optim::Element from_type, const std::byte* from, optim::Element to_type, std::byte* to,
                       int64_t elements, bool first);

/// Waits for all work on the stream (null: none). Returns also if the device has failed: then nothing uses
/// its memory any more, and the call that needs the work reports the failure.
void settle(kernels::Stream* stream) noexcept;

}  // namespace overspill::engine
