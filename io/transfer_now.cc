#include "io/transfer_now.h"

#include "base/mutex.h"

namespace overspill::io {
namespace {

/// Not a std::binary_semaphore: where that is not free, libstdc++'s try_acquire() gives the CPU away four
/// times before it says so, which costs milliseconds beside busy threads.
class Completion {
 public:
  void set() {
    const MutexLock lock(mutex_);
    done_ = true;
    changed_.notify_one();  // under the lock: whoever waits destroys this object next
  }
  bool is_set() {
    const MutexLock lock(mutex_);
    return done_;
  }
  void wait() {
    const MutexLock lock(mutex_);
    while (!done_) changed_.wait(mutex_);
  }

 private:
  Mutex mutex_;
  Condition changed_;
  bool done_ GUARDED_BY(mutex_) = false;
};

}  // namespace

void transfer_now(Store& store, Transfer& transfer) {
  Completion completion;
  transfer.context = &completion;
  transfer.on_complete = [](Transfer& done) noexcept { static_cast<Completion*>(done.context)->set(); };
  store.submit(transfer);
  while (!completion.is_set() && store.poll()) {
  }
  completion.wait();
}

}  // namespace overspill::io
