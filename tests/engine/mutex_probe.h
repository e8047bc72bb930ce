// Whether the engine's mutex is free where something may take long.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "engine/engine.h"

namespace overspill::testing {

/// A thread of its own takes the engine's mutex whenever pass() is called: who calls it while holding that
/// mutex waits in vain.
class MutexProbe {
 public:
  MutexProbe() = default;
  ~MutexProbe() { forget(); }
  MutexProbe(const MutexProbe&) = delete;
  MutexProbe& operator=(const MutexProbe&) = delete;

  /// Until forget(), which comes before the engine's end. Before it pass() does nothing.
  void watch(engine::Engine& engine) {
    const std::lock_guard guard(mutex_);
    watching_ = true;
    thread_ = std::thread([this, &engine] { run(engine); });
  }
  void forget() {
    {
      const std::lock_guard guard(mutex_);
      watching_ = false;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  /// Returns when another thread has had the engine's mutex, or has not had it for long.
  void pass() {
    std::unique_lock lock(mutex_);
    if (!watching_ || held_) return;
    const int64_t own = ++asked_;
    changed_.notify_all();
    const auto answered = [&] { return answered_ >= own || !watching_; };
    if (!changed_.wait_for(lock, kHang, answered)) held_ = true;
  }

  /// Whether somebody called pass() with the mutex.
  bool held() {
    const std::lock_guard guard(mutex_);
    return held_;
  }
  int64_t passed() {
    const std::lock_guard guard(mutex_);
    return answered_;
  }

 private:
  static constexpr std::chrono::seconds kHang{20};

  void run(engine::Engine& engine) {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !watching_ || asked_ > answered_; });
      if (!watching_) return;
      const int64_t now = asked_;
      lock.unlock();
      (void)engine.report();
      lock.lock();
      answered_ = now;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t asked_ = 0;
  int64_t answered_ = 0;
  bool watching_ = false;
  bool held_ = false;
  std::thread thread_;
};

}  // namespace overspill::testing
