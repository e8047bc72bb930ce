// Kernels on a CUDA device, bit-equal to cpu_optim/ (a NaN's payload aside).
#pragma once

#include <cstdint>

#include "kernels/device_kernels.h"

namespace overspill::kernels::cuda {

/// Of any CUDA device: streams tell which. Throws DeviceError where the build has no CUDA.
DeviceKernels& kernels();

// As the interface's calls (kernels/device_kernels.h).
/// To bf16, nearest even, NaN stays NaN.
void narrow(Stream& stream, const float* from, uint16_t* to, int64_t count);
/// to *= factor
void scale(Stream& stream, float* to, float factor, int64_t count);

}  // namespace overspill::kernels::cuda
