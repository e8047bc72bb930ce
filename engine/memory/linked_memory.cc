#include "engine/memory/linked_memory.h"

#include "cpu_optim/numa.h"

namespace overspill::engine {

LinkedMemory::LinkedMemory(kernels::Device& device, Budget& budget, int64_t bytes, const char* what)
    : memory_(budget, bytes, what) {
  if (device.shares_host_memory() || bytes == 0) return;
  // Before pinning, which brings the pages in.
  if (const auto node = device.nearest_numa_node()) optim::prefer_node(memory_.data(), bytes, *node);
  pin_ = device.pin_host(memory_.data(), bytes);
}

}  // namespace overspill::engine
