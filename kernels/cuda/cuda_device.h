// NVIDIA GPUs by the CUDA runtime, which is linked statically: a program built with it also starts where
// there is no driver, and one built without the toolkit has the same functions.
#pragma once

#include <memory>
#include <string>

#include "kernels/device.h"

namespace overspill::kernels {

/// Why there is no such CUDA device: the toolkit was missing when this was built, there is no driver or an
/// old one, fewer devices, or one older than compute capability 8.0. Empty: there is one. Thread-safe.
std::string why_no_cuda(int ordinal = 0);

/// Device `ordinal` of those that CUDA_VISIBLE_DEVICES leaves. Throws DeviceError with why_no_cuda().
///
/// - Streams do not wait for the legacy default stream. Who waits for an event sleeps, it does not spin.
/// - Memory is allocated plainly: the engine takes its arena once, and frees it at the end, because cudaFree
///   waits for the whole device.
/// - A fault that CUDA reports late names the last copy before the event that was waited for, not always the
///   one at fault. After some faults (an illegal address) CUDA refuses everything until the process ends.
/// - Waiting in a stream for an event of another kind of device blocks the caller.
std::unique_ptr<Device> make_cuda_device(int ordinal = 0);

}  // namespace overspill::kernels
