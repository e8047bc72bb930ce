#include "tests/allocation_watch.h"

#include <execinfo.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

namespace {

/// Call sites of operator new while it is on; without allocating anything itself.
class Watch {
 public:
  static constexpr int kDepth = 12;
  struct Site {
    std::array<void*, kDepth> frames{};
    int64_t times = 0;
  };
  void start() {
    std::array<void*, 2> warm{};
    ::backtrace(warm.data(), 2);  // it loads a library the first time
    total_ = 0;
    on_ = true;
  }
  void stop() { on_ = false; }
  void saw() {
    if (!on_) return;
    const std::lock_guard guard(mutex_);
    ++total_;
    std::array<void*, kDepth> frames{};
    ::backtrace(frames.data(), kDepth);
    for (Site& site : sites_) {
      if (site.times > 0 && site.frames != frames) continue;
      site.frames = frames;
      ++site.times;
      return;
    }
  }
  int64_t total() const { return total_; }
  /// For addr2line -Cfie.
  void print() const {
    for (const Site& site : sites_) {
      if (site.times == 0) break;
      fmt::print("{} times:\n", site.times);
      std::fflush(stdout);
      ::backtrace_symbols_fd(site.frames.data() + 2, kDepth - 2, STDOUT_FILENO);
    }
  }

 private:
  std::atomic<bool> on_ = false;
  std::mutex mutex_;
  int64_t total_ = 0;
  std::array<Site, 64> sites_;
};
Watch watch;

}  // namespace

// noinline: the compiler must not pair what it sees of new with the free() in delete.
[[gnu::noinline]] void* operator new(size_t bytes) {
  watch.saw();
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t alignment) {
  watch.saw();
  const size_t unit = static_cast<size_t>(alignment);
  if (void* memory = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace overspill::testing {

void watch_allocations() {
  watch.start();
}

int64_t stop_watching_allocations() {
  watch.stop();
  if (watch.total() > 0) watch.print();
  return watch.total();
}

}  // namespace overspill::testing
