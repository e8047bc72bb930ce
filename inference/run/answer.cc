#include "inference/run/answer.h"

#include <fmt/format.h>

#include "inference/error.h"

namespace overspill::inference {

void Answer::add(Drawn drawn) {
  {
    const MutexLock lock(mutex_);
    if (end_) return;
    drawn_.push_back(std::move(drawn));
  }
  changed_.notify_all();
}

void Answer::end(End end, std::exception_ptr error) {
  {
    const MutexLock lock(mutex_);
    if (end_) return;
    end_ = end;
    error_ = std::move(error);
  }
  changed_.notify_all();
}

bool Answer::wait(std::chrono::nanoseconds timeout) {
  check_process();
  const auto end = std::chrono::steady_clock::now() + timeout;
  const MutexLock lock(mutex_);
  while (!has_news() && changed_.wait_until(mutex_, end)) {
  }
  return has_news();
}

std::optional<Drawn> Answer::take() {
  check_process();
  const MutexLock lock(mutex_);
  while (!has_news()) changed_.wait(mutex_);
  if (drawn_.empty()) {
    if (error_) std::rethrow_exception(error_);
    return std::nullopt;
  }
  Drawn drawn = std::move(drawn_.front());
  drawn_.pop_front();
  return drawn;
}

std::optional<End> Answer::ended() const {
  check_process();
  const MutexLock lock(mutex_);
  return end_;
}

void Answer::cancel() {
  check_process();
  {
    const MutexLock lock(mutex_);
    drawn_.clear();
    if (!end_) end_ = End::cancelled;
  }
  changed_.notify_all();
}

/// A thread that is not in this process may hold the lock for ever.
void Answer::check_process() const {
  if (process_.here()) return;
  throw WrongProcess(fmt::format(
      "the answer is written in process {}, of which this one was forked; read it there", process_.pid()));
}

}  // namespace overspill::inference
