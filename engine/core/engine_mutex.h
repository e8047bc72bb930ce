// The engine's one mutex, as annotations name it, and time without it.
#pragma once

#include "base/mutex.h"

namespace overspill::engine {

/// In annotations: the mutex of the engine at hand, Monitor::mutex(). Parts of an engine reach it by ways of
/// their own, which Clang would take for different mutexes; no code has to do with those of two engines. No
/// such object is defined, so nothing but an annotation can use it.
extern Mutex engine_mutex;

/// Gives the held mutex up, for what may take long (the disk, a device, a long copy), and takes it again at
/// its end, also where an exception ends it.
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
