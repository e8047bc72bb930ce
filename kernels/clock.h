// The one clock of times that are compared: events of a device, the journal.
#pragma once

#include <chrono>
#include <cstdint>

namespace overspill::kernels {

/// Nanoseconds of the steady clock.
inline int64_t steady_now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace overspill::kernels
