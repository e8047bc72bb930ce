// One small piece of device memory, mapped over a range of addresses again and again (CUDA driver API,
// "Virtual Memory Management").
#pragma once

#include <cstdint>

#include "kernels/device.h"

namespace overspill::kernels {

/// `bytes` (above 0) of addresses that read as 0xFF, for the memory of one piece (2 MiB). Empty where the
/// driver cannot do it: nothing has changed then. The device is the calling thread's.
DeviceMemory map_nan(int ordinal, int64_t bytes);

}  // namespace overspill::kernels
