// The CPU as the device: device memory is host memory, and a copy is done when its call returns.
#pragma once

#include <memory>

#include "kernels/device.h"

namespace overspill::kernels {

std::unique_ptr<Device> make_host_device();

}  // namespace overspill::kernels
