// Host memory that a device copies from and to by itself.
#pragma once

#include "engine/memory/host_memory.h"
#include "kernels/device.h"

namespace overspill::engine {

/// Host memory. For a device with memory of its own it is pinned and, where there is room, on the NUMA node
/// next to the device; the engine's other memory lies on the node of its first user. The device outlives it;
/// no copy is under way when it ends. Move-only.
class LinkedMemory {
 public:
  LinkedMemory() = default;
  /// Throws BudgetError, std::bad_alloc, kernels::DeviceError.
  LinkedMemory(kernels::Device& device, Budget& budget, int64_t bytes, const char* what);
  std::byte* data() const { return memory_.data(); }
  int64_t bytes() const { return memory_.bytes(); }
  std::span<std::byte> span() const { return memory_.span(); }

 private:
  HostMemory memory_;
  kernels::HostPin pin_;
};

}  // namespace overspill::engine
