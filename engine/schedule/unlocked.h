// Time without a lock, for what may take long: the disk, a device, a long copy.
#pragma once

#include <mutex>

namespace overspill::engine {

/// Gives a held lock up, and takes it again at its end, also where an exception ends it.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

}  // namespace overspill::engine
