// What a child that trains until it is killed tells its parent, in memory they share: it outlives the child.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace overspill::testing {

struct Life {
  std::atomic<int64_t> started{0};  // the engine is there, what a dead run left is gone
  std::atomic<int64_t> steps{0};    // in this life
  std::atomic<int64_t> saves_begun{0};
  std::atomic<int64_t> saves_done{0};
  std::atomic<int64_t> saving{0};   // the step of the save under way
  std::atomic<int64_t> save_us{0};  // that the last save took
};

inline Life* map_life(int file) {
  void* memory = ::mmap(nullptr, sizeof(Life), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("the shared memory cannot be mapped");
  return static_cast<Life*>(memory);
}

}  // namespace overspill::testing
