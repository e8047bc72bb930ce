// Stands in for CUDA where CMake found no toolkit.
#include "kernels/cuda/cuda_device.h"

namespace overspill::kernels {

std::string why_no_cuda(int) {
  return "this build has no CUDA: CMake found no toolkit (or OVERSPILL_CUDA is OFF)";
}

std::unique_ptr<Device> make_cuda_device(int ordinal) {
  throw DeviceError(why_no_cuda(ordinal));
}

}  // namespace overspill::kernels
