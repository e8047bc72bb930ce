// What a store does while the kernel takes space for its files, which may last, and where it cannot. This
// program's own fallocate stands before the C library's.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "tests/io/store_test_util.h"

namespace {

/// Called on the thread that wants space, with the file; 0, or the errno that it gets. Null but for the test
/// that sets it.
std::atomic<const std::function<int(int)>*> before_fallocate = nullptr;

}  // namespace

extern "C" __attribute__((visibility("default"))) int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  if (const auto* const call = before_fallocate.load()) {
    errno = (*call)(fd);
    if (errno != 0) return -1;
  }
  static const auto next = reinterpret_cast<decltype(&::fallocate)>(::dlsym(RTLD_NEXT, "fallocate"));
  return next(fd, mode, offset, bytes);
}

namespace overspill::io {
namespace {

TEST(Growth, StatsAreThereWhileTheKernelTakesSpace) {
  const ScratchFolder folder;
  const auto store = make_file_store(file_options(folder.path()));
  std::mutex mutex;
  std::condition_variable changed;
  bool entered = false, answered = false, answered_meanwhile = false;
  const std::function<int(int)> wait_for_the_answer = [&](int) {
    std::unique_lock lock(mutex);
    if (std::exchange(entered, true)) return 0;
    changed.notify_all();
    answered_meanwhile = changed.wait_for(lock, std::chrono::seconds(20), [&] { return answered; });
    return 0;
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

TEST(Growth, WhereTheKernelCannotTakeSpaceZerosAreWrittenAndItIsSaid) {
  const ScratchFolder folder;
  const auto store = make_file_store(file_options(folder.path()));
  int asked = 0;
  const std::function<int(int)> cannot = [&](int) { return ++asked == 1 ? EINTR : EOPNOTSUPP; };
  before_fallocate = &cannot;
  ::testing::internal::CaptureStderr();
  store->reserve(8 * kMiB);
  const std::string told = ::testing::internal::GetCapturedStderr();
  before_fallocate = nullptr;
  EXPECT_GE(asked, 2) << "asked again after a signal";
  EXPECT_NE(told.find("no fallocate"), std::string::npos) << told;
  int64_t blocks = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "overspill-test")) {
    struct stat info {};
    ASSERT_EQ(::stat(entry.path().c_str(), &info), 0);
    blocks += info.st_blocks * 512;
  }
  EXPECT_GE(blocks, 8 * kMiB) << "the space is taken";
}

// The file that has a slab's name is not looked for again once it was made: somebody who may write to the
// folder could have put another one there.
TEST(Growth, AFileThatTakesASlabsNameMeanwhileIsNotTouched) {
  const ScratchFolder folder;
  const auto victim = folder.path() / "victim";
  const std::string secret(kMiB, 's');
  std::ofstream(victim) << secret;
  const auto store = make_file_store(file_options(folder.path()));
  const std::function<int(int)> exchange = [&](int fd) {
    const auto name = std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd));
    std::filesystem::remove(name);
    std::filesystem::create_symlink(victim, name);
    return 0;
  };
  before_fallocate = &exchange;
  store->reserve(kMiB);
  before_fallocate = nullptr;
  AlignedMemory memory(kMiB);
  memory.fill(1);
  const Extent extent = store->allocate(kMiB);
  ASSERT_FALSE(write(*store, extent, memory));
  std::ifstream found(victim);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(found), {}), secret);
}

}  // namespace
}  // namespace overspill::io
