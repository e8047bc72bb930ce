#include "inference/run/team.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "cpu_optim/floating_point.h"
#include "inference/error.h"
#include "io/files.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace overspill::inference {
namespace {

// About 50 us: longer than any thread waits for its neighbours in a layer.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Returns once the value is another one.
void wait_for_change(const std::atomic<int>& value, int from) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != from) return;
    relax();
  }
  value.wait(from, std::memory_order_acquire);
}

/// Counters that run for ever: past the largest int they go on at the smallest.
void count_up(std::atomic<int>& value) {
  value.store(static_cast<int>(static_cast<unsigned>(value.load(std::memory_order_relaxed)) + 1u),
              std::memory_order_release);
  value.notify_all();
}

}  // namespace

void check_process(const io::OwnProcess& process) {
  if (process.here()) return;
  throw WrongProcess(
      fmt::format("the model was opened by process {}, of which this one was forked, and its threads "
                  "and weights are there; open it here",
                  process.pid()));
}

Team::Team(int threads) : size_(threads) {
  threads_.reserve(static_cast<size_t>(std::max(0, threads - 1)));
  const auto end = [this] {
    count_up(started_);  // work_ is null
    for (std::thread& thread : threads_) thread.join();
  };
  try {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { serve(i); });
  } catch (const std::system_error& error) {
    end();
    throw io::no_threads(error, fmt::format("inference needs {}", threads));
  } catch (...) {  // no memory
    end();
    throw;
  }
}

Team::~Team() {
  work_ = nullptr;
  count_up(started_);
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& work) {
  check_process(process_);
  const optim::FloatingPointMode mode;
  work_ = &work;
  failed_ = false;
  count_up(started_);
  call(0);
  barrier();
  if (failed_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Team::barrier() {
  const int before = passed_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    count_up(passed_);
  } else {
    wait_for_change(passed_, before);
  }
}

void Team::serve(int thread) {
  const optim::FloatingPointMode mode;
  for (int seen = 0;; seen = static_cast<int>(static_cast<unsigned>(seen) + 1u)) {
    wait_for_change(started_, seen);
    if (work_ == nullptr) return;
    call(thread);
    barrier();
  }
}

void Team::call(int thread) noexcept {
  try {
    (*work_)(thread);
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

}  // namespace overspill::inference
