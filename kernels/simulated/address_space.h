// The memory of a simulated device (kernels/simulated_device.h).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "kernels/simulated_device.h"

namespace overspill::kernels {

/// The device's address space: which addresses are live, and what was freed lately. Thread-safe.
class AddressSpace {
 public:
  explicit AddressSpace(const SimulatedDeviceOptions& options) : options_(options) {}
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;
  ~AddressSpace();

  std::byte* allocate(int64_t bytes);
  void free(std::byte* data) noexcept;
  /// Runs `use`, without the mutex, while [data, data + bytes) is held against free(); throws DeviceError
  /// unless it lies in one live block.
  void with(const void* data, int64_t bytes, const char* what, const std::function<void()>& use);
  void verify();
  /// Whether an address lies in a live block.
  bool holds(const void* data) const;
  int64_t used_bytes() const {
    const MutexLock lock(mutex_);
    return used_bytes_;
  }

 private:
  struct FreePages {
    void operator()(std::byte* data) const noexcept;
  };
  /// One allocation. `mapped_bytes` rounds `bytes` up to pages; what lies between must stay poison (a write
  /// past the end).
  struct Block {
    std::unique_ptr<std::byte, FreePages> pages;
    int64_t bytes = 0;
    int64_t mapped_bytes = 0;
    int copies = 0;  // running now

    bool poisoned_from(int64_t begin) const;
  };

  Block& find(const std::byte* data, int64_t bytes, const char* what) REQUIRES(mutex_);
  void look_for_writes(const Block& block) REQUIRES(mutex_);
  void throw_violation() REQUIRES(mutex_);

  const SimulatedDeviceOptions options_;
  mutable Mutex mutex_;
  Condition copies_done_;
  std::map<const std::byte*, Block> live_ GUARDED_BY(mutex_);
  std::deque<Block> quarantine_ GUARDED_BY(mutex_);
  std::deque<std::string> violations_ GUARDED_BY(mutex_);  // found, not yet thrown
  int64_t used_bytes_ GUARDED_BY(mutex_) = 0;
  int64_t quarantined_bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace overspill::kernels
