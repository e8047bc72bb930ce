// Kernels on a CUDA device, bit-equal to cpu_optim/ (a NaN's payload aside).
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/device_kernels.h"

namespace overspill::kernels::cuda {

/// Of device `ordinal`, from any thread. Throws DeviceError where the build has no CUDA.
std::unique_ptr<DeviceKernels> make_kernels(int ordinal);

// As the interface's calls (kernels/device_kernels.h); the stream's device is the thread's.
/// To bf16, nearest even, NaN stays NaN.
void narrow(Stream& stream, const float* from, uint16_t* to, int64_t count);
/// to *= factor
void scale(Stream& stream, float* to, float factor, int64_t count);

}  // namespace overspill::kernels::cuda
