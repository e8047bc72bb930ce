// Workers without threads: each task is an event of virtual time.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>

#include "cpu_optim/executor.h"
#include "cpu_optim/floating_point.h"
#include "io/virtual_time.h"

namespace overspill::testing {

class VirtualExecutor final : public optim::Executor {
 public:
  /// Plays `threads` workers; a task takes up to `task_us_max`.
  VirtualExecutor(std::shared_ptr<io::VirtualTime> time, int threads, int64_t task_us_max, uint64_t seed)
      : time_(std::move(time)), threads_(threads), task_us_max_(task_us_max), random_(seed) {}
  ~VirtualExecutor() override {
    while (!tasks_->empty()) run_next(*tasks_);
  }

  int threads() const override { return threads_; }

  void submit(std::function<void()> task) override {
    tasks_->push_back(std::move(task));
    const auto delay = static_cast<int64_t>(random_() % static_cast<uint64_t>(task_us_max_ + 1));
    // The queue may be empty then: the destructor has run what was left.
    time_->after(delay, [tasks = tasks_] {
      if (!tasks->empty()) run_next(*tasks);
    });
  }

  void parallel_for(int64_t count, const std::function<void(int64_t)>& body) override {
    const optim::FloatingPointMode mode;
    for (int64_t i = 0; i < count; ++i) body(i);
  }

 private:
  using Tasks = std::deque<std::function<void()>>;

  static void run_next(Tasks& tasks) {
    const std::function<void()> task = std::move(tasks.front());
    tasks.pop_front();
    const optim::FloatingPointMode mode;
    task();
  }

  std::shared_ptr<io::VirtualTime> time_;
  int threads_;
  int64_t task_us_max_;
  std::mt19937_64 random_;
  std::shared_ptr<Tasks> tasks_ = std::make_shared<Tasks>();
};

}  // namespace overspill::testing
