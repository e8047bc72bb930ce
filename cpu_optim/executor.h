// Where updates run: a fixed number of worker threads. Two forms behind one seam: oneTBB, and plain
// std::thread (ThreadSanitizer).
//
// Every worker keeps denormals and rounds to nearest, whatever its creator's floating-point mode was: results
// do not depend on which thread ran a task.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace overspill::optim {

class Executor {
 public:
  virtual ~Executor() = default;  // runs what was submitted, then joins
  virtual int threads() const = 0;
  /// Runs `task` on some worker, in the order submitted (starts in order; with several workers, runs side by
  /// side). Never blocks. A task must not throw.
  virtual void submit(std::function<void()> task) = 0;
  /// Calls body(i) for every i in [0, count) on the workers; returns when all have returned; rethrows the
  /// first exception. Must not be called from a worker.
  virtual void parallel_for(int64_t count, const std::function<void(int64_t)>& body) = 0;
};

std::unique_ptr<Executor> make_thread_executor(int threads);
std::unique_ptr<Executor> make_tbb_executor(int threads);
/// oneTBB, unless the build is for ThreadSanitizer or the environment has OVERSPILL_EXECUTOR=threads.
std::unique_ptr<Executor> make_executor(int threads);

}  // namespace overspill::optim
