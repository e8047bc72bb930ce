#include "engine/checkpoint/side_by_side.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "io/files.h"

namespace overspill::engine {
namespace {

class SideBySide {
 public:
  SideBySide(int64_t items, const std::function<int64_t(int, int64_t)>& work) : items_(items), work_(work) {}

  void run(int workers, const std::function<void(int64_t)>& report) EXCLUDES(mutex_) {
    {
      const Joined threads(*this, static_cast<int>(std::min<int64_t>(workers, items_)));
      for (int64_t reported = 0, done = 0; !is_over(reported, done);) {
        report(done);
        reported = done;
      }
    }
    const MutexLock lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  /// The threads; its destructor lets no further item begin, and waits for those that have.
  class Joined {
   public:
    Joined(SideBySide& work, int workers) : work_(work) {
      threads_.reserve(static_cast<size_t>(workers));
      for (int worker = 0; worker < workers; ++worker) {
        work_.begin_worker();
        try {
          threads_.emplace_back([&work, worker] { work.take_items(worker); });
        } catch (const std::system_error& error) {
          work_.end_worker();
          if (worker > 0) return;  // fewer will do
          throw io::no_threads(error, fmt::format("{} threads that read files were wanted", workers));
        }
      }
    }
    Joined(const Joined&) = delete;
    Joined& operator=(const Joined&) = delete;
    ~Joined() { work_.stop(); }

   private:
    SideBySide& work_;
    std::vector<std::jthread> threads_;
  };

  /// Waits for news: false with more bytes in `done`, true where no worker is left.
  bool is_over(int64_t reported, int64_t& done) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    while (done_ == reported && workers_ > 0) changed_.wait(mutex_);
    done = done_;
    return done == reported;
  }

  void begin_worker() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    ++workers_;
  }

  void end_worker() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    --workers_;
    changed_.notify_one();
  }

  void stop() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    next_ = items_;
  }

  int64_t take() EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    return next_ < items_ ? next_++ : items_;
  }

  void take_items(int worker) noexcept EXCLUDES(mutex_) {
    for (int64_t item = take(); item < items_; item = take()) {
      try {
        const int64_t bytes = work_(worker, item);
        const MutexLock lock(mutex_);
        done_ += bytes;
        changed_.notify_one();
      } catch (...) {
        fail(item);
      }
    }
    end_worker();
  }

  void fail(int64_t item) EXCLUDES(mutex_) {
    const MutexLock lock(mutex_);
    next_ = items_;
    if (item > failed_) return;
    failed_ = item;
    error_ = std::current_exception();
  }

  const int64_t items_;
  const std::function<int64_t(int, int64_t)>& work_;
  Mutex mutex_;
  Condition changed_;
  int64_t next_ GUARDED_BY(mutex_) = 0;
  int64_t done_ GUARDED_BY(mutex_) = 0;
  int workers_ GUARDED_BY(mutex_) = 0;
  int64_t failed_ GUARDED_BY(mutex_) = std::numeric_limits<int64_t>::max();
  std::exception_ptr error_ GUARDED_BY(mutex_);
};

}  // namespace

void side_by_side(int64_t items, int workers, const std::function<int64_t(int, int64_t)>& work,
                  const std::function<void(int64_t)>& report) {
  SideBySide(items, work).run(workers, report);
}

}  // namespace overspill::engine
