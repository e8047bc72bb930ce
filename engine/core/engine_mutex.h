// The name by which annotations mean the engine's one mutex; and Unlocked, which gives the mutex up for a
// while.
#pragma once

#include "base/mutex.h"

namespace overspill::engine {

/// In annotations: the mutex of the engine at hand, Monitor::mutex(). Each part of an engine reaches it
/// through its own reference, which Clang would take for different mutexes. No code uses two engines, so one
/// name is enough. The object is never defined: only annotations can use it.
extern Mutex engine_mutex;

/// Gives the held mutex up for work that may take long (disk, device, a long copy). Its destructor locks the
/// mutex again, also after an exception.
class SCOPED_CAPABILITY Unlocked {
 public:
  explicit Unlocked(Mutex& mutex) RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  ~Unlocked() RELEASE() { mutex_.lock(); }  // to Clang the end of a scope that gives up is what undoes it
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace overspill::engine
