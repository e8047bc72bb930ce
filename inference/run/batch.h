// Answers to many requests at once, by a thread of its own.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "inference/run/answer.h"
#include "inference/run/model.h"
#include "inference/run/scheduler.h"
#include "io/own_process.h"

namespace overspill::inference {

struct BatchOptions {
  int64_t texts = 8;         // computed at a time, at most
  int64_t positions = 2048;  // of the cache of all texts, and of beginnings that are kept for others
  int64_t waiting = 64;      // requests beside those that are computed
};

/// Threads: any. In a forked child every call throws WrongProcess, and the destructor must not be called.
class Batch {
 public:
  /// Throws std::invalid_argument for options out of range, NoRoom where the model's budget has too little
  /// left for caches, io::StoreError where the machine refuses a thread.
  Batch(std::shared_ptr<Model> model, const BatchOptions& options);
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  ~Batch();

  /// An answer whose tokens come as they are drawn. The text is dropped when nobody holds the answer.
  /// Throws QueueFull where as many requests wait as may; std::invalid_argument for one that cannot be
  /// computed; what ended the batch, if an error did; std::logic_error after close.
  std::shared_ptr<Answer> submit(Request request);
  /// Answers that have not ended are cancelled. Returns when the thread has ended. Called again, does
  /// nothing.
  void close();
  /// Whether this thread is the batch's, or in a constraint: then close() throws std::logic_error, and the
  /// destructor must not be called.
  bool is_inside() const;
  Scheduler::Counts counts() const;

 private:
  struct Submitted {
    Request request;
    std::shared_ptr<Answer> answer;
  };

  void check_process() const;
  void forget_answered() REQUIRES(mutex_);
  void serve();
  bool wait(std::vector<Submitted>& taken);

  const int64_t unanswered_max_;
  io::OwnProcess process_;
  Scheduler scheduler_;  // its thread's
  mutable Mutex mutex_;
  Condition changed_;
  std::vector<Submitted> submitted_ GUARDED_BY(mutex_);
  // Those among them that have ended go when room is needed.
  std::vector<std::weak_ptr<Answer>> unanswered_ GUARDED_BY(mutex_);
  Scheduler::Counts counts_ GUARDED_BY(mutex_);
  bool closed_ GUARDED_BY(mutex_) = false;
  std::exception_ptr error_ GUARDED_BY(mutex_);
  Mutex joining_;
  std::thread thread_ GUARDED_BY(joining_);
};

}  // namespace overspill::inference
