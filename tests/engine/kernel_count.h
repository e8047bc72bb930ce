// What the kernel counts of this process's transfers.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace overspill::testing {

/// A line of /proc/self/io ("read_bytes:", "write_bytes:"); -1 where there is none.
inline int64_t kernel_count(const char* key) {
  std::ifstream io("/proc/self/io");
  std::string name;
  int64_t value = 0;
  while (io >> name >> value) {
    if (name == key) return value;
  }
  return -1;
}

}  // namespace overspill::testing
