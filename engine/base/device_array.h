// A gradient that a framework gives in its own device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace overspill::engine {

/// Contiguous elements in device memory, unchanged until `owner` is let go, which may be on any thread.
struct DeviceArray {
  const std::byte* data = nullptr;
  int64_t bytes = 0;
  std::string dtype;  // "BF16", "F16", "F32"
  std::shared_ptr<const void> owner;
};

}  // namespace overspill::engine
