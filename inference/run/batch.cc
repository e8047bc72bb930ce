#include "inference/run/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>

#include "inference/error.h"
#include "io/files.h"

namespace overspill::inference {
namespace {

thread_local const Batch* serving = nullptr;  // whose thread this is

int64_t unanswered(const BatchOptions& options) {
  if (options.waiting < 1 || options.waiting > 1 << 20) {
    throw std::invalid_argument(
        fmt::format("waiting is {}, and is to be from 1 to {}", options.waiting, 1 << 20));
  }
  return std::clamp<int64_t>(options.texts, 0, 1 << 20) + options.waiting;  // whose own check comes later
}

}  // namespace

Batch::Batch(std::shared_ptr<Model> model, const BatchOptions& options)
    : unanswered_max_(unanswered(options)), scheduler_(std::move(model), options.texts, options.positions) {
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    throw io::no_threads(error, "a batch needs one");
  }
}

Batch::~Batch() {
  close();
}

bool Batch::is_inside() const {
  return serving == this || scheduler_.model().is_inside();
}

std::shared_ptr<Answer> Batch::submit(Request request) {
  check_process();
  scheduler_.check(request);
  auto answer = std::make_shared<Answer>();
  {
    const MutexLock lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    if (closed_) throw std::logic_error("the batch is closed; open another one");
    if (std::ssize(unanswered_) >= unanswered_max_) forget_answered();
    if (std::ssize(unanswered_) >= unanswered_max_) {
      throw QueueFull(
          fmt::format("{} requests are computed or wait already; try again later, or open the batch "
                      "with a larger `waiting`",
                      unanswered_.size()));
    }
    unanswered_.push_back(answer);
    submitted_.push_back({std::move(request), answer});
  }
  changed_.notify_all();
  return answer;
}

/// The thread, which is in a pass, may not know yet that an answer was cancelled.
void Batch::forget_answered() {
  std::erase_if(unanswered_, [](const std::weak_ptr<Answer>& each) {
    const auto answer = each.lock();
    return answer == nullptr || answer->ended();
  });
}

void Batch::close() {
  check_process();
  if (is_inside()) {
    throw std::logic_error(
        "a constraint closes the batch that calls it, which would wait for itself; close it elsewhere");
  }
  {
    const MutexLock lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  const MutexLock lock(joining_);
  if (thread_.joinable()) thread_.join();
}

Scheduler::Counts Batch::counts() const {
  check_process();
  const MutexLock lock(mutex_);
  return counts_;
}

void Batch::check_process() const {
  if (process_.here()) return;
  throw WrongProcess(
      fmt::format("the batch was opened by process {}, of which this one was forked, and its thread is "
                  "there; open one here",
                  process_.pid()));
}

void Batch::serve() {
  serving = this;
  std::vector<Submitted> taken;
  try {
    while (wait(taken)) {
      for (Submitted& each : taken) scheduler_.add(std::move(each.request), each.answer);
      taken.clear();
      scheduler_.pass();
    }
  } catch (...) {
    const MutexLock lock(mutex_);
    error_ = std::current_exception();
  }
  // From here on nothing is submitted: the batch is closed, or has failed.
  std::vector<Submitted> left;
  std::exception_ptr error;
  {
    const MutexLock lock(mutex_);
    left.swap(submitted_);
    error = error_;
  }
  // Without the mutex: with the requests their constraints end, which are the caller's code.
  const End end = error ? End::failed : End::cancelled;
  scheduler_.end_all(end, error);
  for (const auto* all : {&taken, &left}) {
    for (const Submitted& each : *all) each.answer->end(end, error);
  }
}

/// Takes what was submitted. False where the batch is closed.
bool Batch::wait(std::vector<Submitted>& taken) {
  const MutexLock lock(mutex_);
  const bool computing = scheduler_.texts() > 0;
  counts_ = scheduler_.counts();
  while (!closed_ && !computing && submitted_.empty()) changed_.wait(mutex_);
  taken.swap(submitted_);
  return !closed_;
}

}  // namespace overspill::inference
