// The locks of the standard library, under names that Clang's analysis knows (base/thread_safety.h). They
// cost what those cost.
//
//   class Queue {
//    public:
//     void push(Task task) EXCLUDES(mutex_) {
//       const MutexLock lock(mutex_);
//       tasks_.push_back(std::move(task));
//       there_.notify_one();
//     }
//     Task pop() {
//       const MutexLock lock(mutex_);
//       while (tasks_.empty()) there_.wait(mutex_);
//       return take_first();
//     }
//
//    private:
//     Task take_first() REQUIRES(mutex_);
//
//     Mutex mutex_;
//     Condition there_;
//     std::deque<Task> tasks_ GUARDED_BY(mutex_);
//   };
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <shared_mutex>

#include "base/thread_safety.h"

namespace overspill {

class CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  /// For a lambda that is called while its maker holds the mutex, by a function that knows nothing of it.
  void assume_held() const ASSERT_CAPABILITY(this) {}

 private:
  friend class Condition;
  std::mutex mutex_;
};

/// Held by one writer (MutexLock) or by many readers (ReaderLock).
class CAPABILITY("mutex") SharedMutex {
 public:
  SharedMutex() = default;
  SharedMutex(const SharedMutex&) = delete;
  SharedMutex& operator=(const SharedMutex&) = delete;

  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }
  void lock_shared() ACQUIRE_SHARED() { mutex_.lock_shared(); }
  void unlock_shared() RELEASE_SHARED() { mutex_.unlock_shared(); }

 private:
  std::shared_mutex mutex_;
};

/// Holds a mutex, or what is locked like one, to the end of the block, but for what stands between unlock()
/// and lock().
template <class AnyMutex>
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(AnyMutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() RELEASE() {
    held_ = false;
    mutex_.unlock();
  }
  void lock() ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  AnyMutex& mutex_;
  bool held_ = true;
};

/// The same for a reader.
class SCOPED_CAPABILITY ReaderLock {
 public:
  explicit ReaderLock(SharedMutex& mutex) ACQUIRE_SHARED(mutex) : mutex_(mutex) { mutex_.lock_shared(); }
  ~ReaderLock() RELEASE() { mutex_.unlock_shared(); }
  ReaderLock(const ReaderLock&) = delete;
  ReaderLock& operator=(const ReaderLock&) = delete;

 private:
  SharedMutex& mutex_;
};

/// Waited for with the mutex, not with its lock: so Clang sees that it is held, also where a caller took it.
/// Whoever waits asks in a loop for what it waits for, since a wait may end for no reason.
class Condition {
 public:
  void wait(Mutex& mutex) REQUIRES(mutex) {
    Held held(mutex);
    changed_.wait(held.lock);
  }
  /// False where the time is over.
  template <class Clock, class Duration>
  bool wait_until(Mutex& mutex, std::chrono::time_point<Clock, Duration> end) REQUIRES(mutex) {
    Held held(mutex);
    return changed_.wait_until(held.lock, end) == std::cv_status::no_timeout;
  }
  template <class Rep, class Period>
  bool wait_for(Mutex& mutex, std::chrono::duration<Rep, Period> time) REQUIRES(mutex) {
    Held held(mutex);
    return changed_.wait_for(held.lock, time) == std::cv_status::no_timeout;
  }
  void notify_one() noexcept { changed_.notify_one(); }
  void notify_all() noexcept { changed_.notify_all(); }

 private:
  /// The caller's hold, as the standard library wants to see it. The caller keeps it, also where a wait
  /// throws.
  struct Held {
    explicit Held(Mutex& mutex) : lock(mutex.mutex_, std::adopt_lock) {}
    ~Held() { lock.release(); }
    std::unique_lock<std::mutex> lock;
  };

  std::condition_variable changed_;
};

}  // namespace overspill
