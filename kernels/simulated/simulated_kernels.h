// Kernels of a simulated device: on a stream's thread, element by element as a GPU's threads would.
#pragma once

#include <chrono>
#include <memory>

#include "kernels/device_kernels.h"
#include "kernels/simulated/address_space.h"

namespace overspill::kernels {

/// Each starts late, by half of what a copy may, and holds all memory that it touches. `memory` outlives it.
std::unique_ptr<DeviceKernels> make_simulated_kernels(AddressSpace& memory, std::chrono::microseconds delay);

}  // namespace overspill::kernels
