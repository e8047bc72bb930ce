#include "cpu_optim/executor.h"

#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "cpu_optim/floating_point.h"

namespace overspill::optim {

namespace {

using Task = std::function<void()>;

thread_local bool inside_task = false;

// noexcept: a task that throws has broken its contract, and nobody waits who could be told.
void run_task(Task task) noexcept {
  const FloatingPointMode mode;
  inside_task = true;
  task();
  task = nullptr;  // what it owns goes while the mode holds, and before anyone is told that it is done
  inside_task = false;
}

int checked_threads(int threads) {
  if (threads >= 1) return threads;
  throw std::invalid_argument("an executor needs at least 1 thread, not " + std::to_string(threads));
}

/// Tasks in the order submitted, in memory that stays: a deque would ask for more every few tasks.
class TaskQueue {
 public:
  bool empty() const { return count_ == 0; }
  void push(Task task) {
    if (count_ == ring_.size()) {
      std::rotate(ring_.begin(), ring_.begin() + static_cast<std::ptrdiff_t>(first_), ring_.end());
      first_ = 0;
      ring_.resize(std::max<size_t>(64, 2 * ring_.size()));
    }
    ring_[(first_ + count_++) % ring_.size()] = std::move(task);
  }
  Task pop() {
    Task task = std::move(ring_[first_]);
    first_ = (first_ + 1) % ring_.size();
    --count_;
    return task;
  }

 private:
  std::vector<Task> ring_;
  size_t first_ = 0;
  size_t count_ = 0;
};

/// What the workers of one parallel_for share; on its caller's stack.
struct SharedLoop {
  const std::function<void(int64_t)>& body;
  const int64_t count;
  std::atomic<int64_t> next = 0;
  Mutex mutex;
  Condition done;
  int unfinished GUARDED_BY(mutex);
  std::exception_ptr error GUARDED_BY(mutex);

  void work() {
    try {
      for (int64_t i = next++; i < count; i = next++) body(i);
    } catch (...) {
      next = count;
      const MutexLock lock(mutex);
      if (!error) error = std::current_exception();
    }
    const MutexLock lock(mutex);
    if (--unfinished == 0) done.notify_one();  // under the lock: the caller's stack is gone after it
  }
};

// One task a worker; each takes the next index until none is left or a body has thrown.
void parallel_for_on(Executor& executor, int64_t count, const std::function<void(int64_t)>& body) {
  if (inside_task) {
    throw std::logic_error("Executor::parallel_for was called from a worker; it would wait for itself");
  }
  if (count <= 0) return;
  const auto tasks = static_cast<int>(std::min<int64_t>(count, executor.threads()));
  SharedLoop loop{.body = body, .count = count, .mutex = {}, .done = {}, .unfinished = tasks, .error = {}};
  for (int task = 0; task < tasks; ++task) executor.submit([&loop] { loop.work(); });
  const MutexLock lock(loop.mutex);
  while (loop.unfinished != 0) loop.done.wait(loop.mutex);
  if (loop.error) std::rethrow_exception(loop.error);
}

class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int threads) {
    workers_.reserve(static_cast<size_t>(checked_threads(threads)));
    try {
      for (int i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {
      end();
      throw std::system_error(
          error.code(),
          "engine.threads = " + std::to_string(threads) + ", and the machine gave " +
              std::to_string(workers_.size()) +
              " threads: set it lower, or raise the limit of processes (ulimit -u, a container's "
              "pids.max)");
    }
  }

  ~ThreadExecutor() override { end(); }

  int threads() const override { return static_cast<int>(workers_.size()); }

  void submit(Task task) override {
    {
      const MutexLock lock(mutex_);
      queue_.push(std::move(task));
    }
    wake_.notify_one();
  }

  void parallel_for(int64_t count, const std::function<void(int64_t)>& body) override {
    parallel_for_on(*this, count, body);
  }

 private:
  void end() {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void work() {
    MutexLock lock(mutex_);
    while (true) {
      while (!stopping_ && queue_.empty()) wake_.wait(mutex_);
      if (queue_.empty()) return;
      Task task = queue_.pop();
      lock.unlock();
      run_task(std::move(task));
      lock.lock();
    }
  }

  Mutex mutex_;
  Condition wake_;
  TaskQueue queue_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;  // last: they use the members above
};

// oneTBB's pool has one worker fewer than the machine has cores, because it counts on the caller to work too.
// Ours only submits, so while executors live the pool is allowed as many workers as they asked for together.
// A host program's own lower limit still holds.
class WorkerAllowance {
 public:
  explicit WorkerAllowance(int threads) : threads_(threads) { change(threads_); }
  ~WorkerAllowance() { change(-threads_); }
  WorkerAllowance(const WorkerAllowance&) = delete;
  WorkerAllowance& operator=(const WorkerAllowance&) = delete;

 private:
  static void change(int by) {
    static Mutex mutex;
    static int total GUARDED_BY(mutex) = 0;
    static std::unique_ptr<tbb::global_control> control GUARDED_BY(mutex);
    const MutexLock lock(mutex);
    total += by;
    control.reset();  // of several controls the lowest holds, so the old one has to go first
    if (total == 0) return;
    const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    control = std::make_unique<tbb::global_control>(tbb::global_control::max_allowed_parallelism,
                                                    static_cast<size_t>(std::max(total + 1, cores)));
  }

  int threads_;
};

// An arena's own queue does not promise the order in which tasks start, so ours holds the tasks and the arena
// is only told, once a task, to run the next.
class TbbExecutor final : public Executor {
 public:
  explicit TbbExecutor(int threads) : allowance_(checked_threads(threads)), arena_(threads, 0) {
    arena_.initialize();
  }

  ~TbbExecutor() override {
    const MutexLock lock(mutex_);
    while (unfinished_ != 0) idle_.wait(mutex_);
  }

  int threads() const override { return arena_.max_concurrency(); }

  void submit(Task task) override {
    {
      const MutexLock lock(mutex_);
      queue_.push(std::move(task));
      ++unfinished_;
    }
    arena_.enqueue([this] { run_next(); });
  }

  void parallel_for(int64_t count, const std::function<void(int64_t)>& body) override {
    parallel_for_on(*this, count, body);
  }

 private:
  void run_next() noexcept {
    MutexLock lock(mutex_);
    Task task = queue_.pop();
    lock.unlock();
    run_task(std::move(task));
    lock.lock();
    if (--unfinished_ == 0) idle_.notify_all();  // under the lock: the destructor may be waiting for it
  }

  WorkerAllowance allowance_;
  tbb::task_arena arena_;
  Mutex mutex_;
  Condition idle_;
  TaskQueue queue_ GUARDED_BY(mutex_);
  int64_t unfinished_ GUARDED_BY(mutex_) = 0;
};

}  // namespace

std::unique_ptr<Executor> make_thread_executor(int threads) {
  return std::make_unique<ThreadExecutor>(threads);
}

std::unique_ptr<Executor> make_tbb_executor(int threads) {
  return std::make_unique<TbbExecutor>(threads);
}

std::unique_ptr<Executor> make_executor(int threads) {
#if defined(OVERSPILL_PLAIN_THREADS)
  return make_thread_executor(threads);
#else
  const char* wanted = std::getenv("OVERSPILL_EXECUTOR");
  if (wanted == nullptr || std::string_view(wanted) == "tbb") return make_tbb_executor(threads);
  if (std::string_view(wanted) == "threads") return make_thread_executor(threads);
  throw std::invalid_argument("OVERSPILL_EXECUTOR is '" + std::string(wanted) +
                              "'; it must be tbb or threads, or be left unset");
#endif
}

}  // namespace overspill::optim
