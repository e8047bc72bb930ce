// Threads that compute one forward together.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "io/own_process.h"

namespace overspill::inference {

/// Throws WrongProcess in a forked child of the process that opened the model. Asked before a mutex is
/// locked: in the child it may be locked for ever.
void check_process(const io::OwnProcess& process);

/// A fixed number of threads, of which the caller of `run` is the first. They meet at barriers several times
/// a layer, so they wait by spinning for some microseconds before they ask the kernel to wake them.
class Team {
 public:
  /// Starts `threads` - 1 threads. Throws io::StoreError where the machine refuses one.
  explicit Team(int threads);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team();

  int size() const { return size_; }
  const io::OwnProcess& process() const { return process_; }
  /// Calls work(0) to work(size - 1), one on each thread, and returns when all have returned. One caller at a
  /// time. Rethrows the first exception; work that meets at barriers must not throw. Throws WrongProcess in a
  /// forked child, where there is only the caller; there the destructor must not be called either.
  void run(const std::function<void(int)>& work);
  /// Called by every thread inside `run`: returns once all have called it.
  void barrier();

 private:
  void serve(int thread);
  void call(int thread) noexcept;

  const int size_;
  io::OwnProcess process_;
  const std::function<void(int)>* work_ = nullptr;  // null: the threads are to end
  std::atomic<int> started_ = 0;                    // runs begun
  std::atomic<int> arrived_ = 0;                    // at the barrier at hand
  std::atomic<int> passed_ = 0;                     // barriers
  std::exception_ptr error_;
  std::atomic<bool> failed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace overspill::inference
