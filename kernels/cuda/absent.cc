// Stands in for CUDA where CMake found no toolkit.
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_kernels.h"

namespace overspill::kernels {

std::string why_no_cuda(int) {
  return "this build has no CUDA, since CMake found no toolkit (or OVERSPILL_CUDA is OFF): "
         "install the CUDA toolkit, 12 or newer, and build again";
}

std::unique_ptr<Device> make_cuda_device(int ordinal) {
  throw DeviceError(why_no_cuda(ordinal));
}

namespace cuda {

std::unique_ptr<DeviceKernels> make_kernels(int) {
  throw DeviceError(why_no_cuda());
}
void narrow(Stream&, const float*, uint16_t*, int64_t) {
  throw DeviceError(why_no_cuda());
}
void scale(Stream&, float*, float, int64_t) {
  throw DeviceError(why_no_cuda());
}

}  // namespace cuda
}  // namespace overspill::kernels
