// What a store answers while the kernel takes space for its files, which may last. This program's own
// posix_fallocate stands before the C library's.
#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "tests/io/store_test_util.h"

namespace {

/// Called on the thread that wants space; null but for the test that sets it.
std::atomic<const std::function<void()>*> before_fallocate = nullptr;

}  // namespace

extern "C" __attribute__((visibility("default"))) int posix_fallocate(int fd, off_t offset, off_t bytes) {
  if (const auto* const call = before_fallocate.load()) (*call)();
  static const auto next =
      reinterpret_cast<decltype(&::posix_fallocate)>(::dlsym(RTLD_NEXT, "posix_fallocate"));
  return next(fd, offset, bytes);
}

namespace overspill::io {
namespace {

TEST(Growth, StatsAreThereWhileTheKernelTakesSpace) {
  const ScratchFolder folder;
  const auto store = make_file_store(file_options(folder.path()));
  std::mutex mutex;
  std::condition_variable changed;
  bool entered = false, answered = false, answered_meanwhile = false;
  const std::function<void()> wait_for_the_answer = [&] {
    std::unique_lock lock(mutex);
    if (std::exchange(entered, true)) return;
    changed.notify_all();
    answered_meanwhile = changed.wait_for(lock, std::chrono::seconds(20), [&] { return answered; });
  };
  before_fallocate = &wait_for_the_answer;
  std::thread grower([&] { store->reserve(8 * kMiB); });
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return entered; });
  }
  EXPECT_EQ(store->stats().paths.size(), 1U);
  {
    const std::lock_guard lock(mutex);
    answered = true;
  }
  changed.notify_all();
  grower.join();
  before_fallocate = nullptr;
  EXPECT_TRUE(answered_meanwhile) << "the engine asks under its mutex, and would stand still as long";
  EXPECT_EQ(store->stats().paths[0].reserved_bytes, 8 * kMiB);
}

}  // namespace
}  // namespace overspill::io
