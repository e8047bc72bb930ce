#include "engine/memory/linked_memory.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu_optim/numa.h"

namespace overspill::engine {
namespace {

constexpr int64_t kTouchBytes = 4096;                   // a page
constexpr int64_t kTouchPartBytes = int64_t{64} << 20;  // what is worth a thread

void touch_part(std::byte* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kTouchBytes) *const_cast<volatile std::byte*>(data + i) = std::byte{0};
}

/// Brings the pages of new memory in, by as many threads as there are cores. Pinning would do it too, by one:
/// a minute for 100 GiB.
void touch(std::byte* data, int64_t bytes) {
  const int64_t cores = std::max(1U, std::thread::hardware_concurrency());
  const int64_t parts = std::clamp<int64_t>(bytes / kTouchPartBytes, 1, cores);
  const int64_t part = (bytes / parts + kTouchBytes - 1) / kTouchBytes * kTouchBytes;
  std::vector<std::jthread> others;
  for (int64_t begin = part; begin < bytes; begin += part) {
    const int64_t length = std::min(part, bytes - begin);
    try {
      others.emplace_back([=] { touch_part(data + begin, length); });
    } catch (const std::system_error&) {  // no thread for it
      touch_part(data + begin, length);
    }
  }
  touch_part(data, std::min(part, bytes));
}

}  // namespace

LinkedMemory::LinkedMemory(kernels::Device& device, Budget& budget, int64_t bytes, const char* what)
    : memory_(budget, bytes, what) {
  if (device.shares_host_memory() || bytes == 0) return;
  // Before the pages come in.
  if (const auto node = device.nearest_numa_node()) optim::prefer_node(memory_.data(), bytes, *node);
  touch(memory_.data(), bytes);
  pin_ = device.pin_host(memory_.data(), bytes);
}

}  // namespace overspill::engine
