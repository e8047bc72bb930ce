// The engine's monitor (Hoare 1974, "Monitors: an operating system structuring concept"): the one mutex, the
// condition variable for changes of what it guards, and the engine's failure, which ends every wait.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "engine/core/engine_mutex.h"

namespace overspill::engine {

/// Monitor::failure of an engine that was closed and had not failed.
inline constexpr std::string_view kClosed = "the engine was closed";

class Monitor {
 public:
  Monitor() = default;
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  /// The one mutex, which annotations call engine_mutex.
  Mutex& mutex() RETURN_CAPABILITY(engine_mutex) { return mutex_; }

  /// First failure wins; wakes everyone.
  void fail(const std::string& cause) REQUIRES(engine_mutex);
  /// Throws EngineFailed after a failure, which then counts as told; std::invalid_argument once the engine is
  /// closed.
  void check() REQUIRES(engine_mutex);

  Condition changed;  // of what the mutex guards
  std::string failure GUARDED_BY(engine_mutex);
  std::string cause GUARDED_BY(engine_mutex);  // the cause alone, which `failure` contains
  int told GUARDED_BY(engine_mutex) = 0;       // calls that have thrown the failure
  std::string last_checkpoint GUARDED_BY(engine_mutex);

 protected:
  ~Monitor() = default;

 private:
  Mutex mutex_;
};

}  // namespace overspill::engine
