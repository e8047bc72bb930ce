// A store over several paths: shares by speed, paths of different size, paths that fail.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/io/loop_disk.h"
#include "tests/io/step_workload.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

namespace fs = std::filesystem;
using Kind = Transfer::Kind;
constexpr PathSpeed kFast{300e6, 300e6};
constexpr PathSpeed kSlow{100e6, 100e6};

class Paths : public testing::Test {
 protected:
  FileStoreOptions options(PathSpeed first = kFast, PathSpeed second = kSlow) const {
    FileStoreOptions options = file_options(first_.path());
    options.paths.push_back(second_.path());
    options.speeds = {first, second};
    options.backend = FileStoreOptions::Backend::threads;
    return options;
  }
  Extent written(Store& store, int64_t bytes, uint64_t seed) {
    AlignedMemory memory(bytes);
    memory.fill(seed);
    Transfer transfer = make_transfer(Kind::write, store.allocate(bytes), memory.data());
    store.submit(transfer);
    store.drain();
    EXPECT_FALSE(transfer.error) << transfer.error->message();
    return transfer.extent;
  }
  void expect_content(Store& store, const Extent& extent, uint64_t seed) {
    AlignedMemory expected(extent.bytes);
    expected.fill(seed);
    AlignedMemory found(extent.bytes);
    const auto error = read(store, extent, found);
    ASSERT_FALSE(error) << error->message();
    EXPECT_TRUE(found == expected);
  }

  ScratchFolder first_;
  ScratchFolder second_;
};

// A folder that is a small disk of its own. Skips without root.
class SmallDisk {
 public:
  SmallDisk(const fs::path& path, int64_t mib) : path_(path) {
    mounted_ = ::geteuid() == 0 &&
               ::mount("tmpfs", path.c_str(), "tmpfs", 0, fmt::format("size={}m", mib).c_str()) == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(path_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  explicit operator bool() const { return mounted_; }

 private:
  fs::path path_;
  bool mounted_;
};
constexpr const char* kNoMount = "mounting a small tmpfs takes root, or is refused here";

TEST_F(Paths, SpaceIsTakenBySpeedWithSomeSlack) {
  const auto store = make_file_store(options());
  store->reserve(64 * kMiB);
  const StoreStats stats = store->stats();
  ASSERT_EQ(stats.paths.size(), 2U);
  EXPECT_EQ(stats.paths[0].reserved_bytes, 54 * kMiB);
  EXPECT_EQ(stats.paths[1].reserved_bytes, 18 * kMiB);
  EXPECT_EQ(stats.reserved_bytes, 72 * kMiB);
  EXPECT_DOUBLE_EQ(stats.paths[0].share, 0.75);
  EXPECT_EQ(stats.paths[0].path, first_.path());
  EXPECT_TRUE(stats.paths[0].closed.empty());
}

TEST_F(Paths, BytesAreSharedOutAsTheSpeedsAre) {
  const auto store = make_file_store(options());
  store->reserve(64 * kMiB);
  std::vector<Extent> extents;
  for (uint64_t i = 0; i < 48; ++i) extents.push_back(written(*store, kMiB, i));
  StoreStats stats = store->stats();
  EXPECT_NEAR(static_cast<double>(stats.paths[0].bytes_written) / kMiB, 36, 2);
  EXPECT_NEAR(static_cast<double>(stats.paths[1].bytes_written) / kMiB, 12, 2);
  EXPECT_EQ(stats.bytes_written, 48 * kMiB);
  for (uint64_t i = 0; i < extents.size(); ++i) expect_content(*store, extents[i], i);
  stats = store->stats();
  EXPECT_EQ(stats.paths[0].bytes_read, stats.paths[0].bytes_written);
  for (const PathStats& path : stats.paths) {
    EXPECT_EQ(path.writes.count, path.bytes_written / kMiB);
    EXPECT_EQ(path.prefetch_reads.count, path.bytes_read / kMiB);
    EXPECT_EQ(path.demand_reads.count, 0);
    EXPECT_GT(path.writes.p50_ns, 0);
    EXPECT_LE(path.writes.p50_ns, path.writes.p99_ns);
    EXPECT_LE(path.writes.p99_ns, path.writes.max_ns);
    EXPECT_GT(path.busy_ns, 0);
    EXPECT_EQ(path.in_flight, 0);
    EXPECT_EQ(path.in_flight_max, 1);
  }
}

TEST_F(Paths, SeveralAreMeasuredAtOpenAndOneIsNot) {
  FileStoreOptions measured = options();
  measured.speeds.clear();
  const auto store = make_file_store(measured);
  const StoreStats stats = store->stats();
  EXPECT_GT(stats.paths[0].read_bytes_per_s, 0);
  EXPECT_GT(stats.paths[1].write_bytes_per_s, 0);
  EXPECT_NEAR(stats.paths[0].share + stats.paths[1].share, 1, 1e-9);
  EXPECT_EQ(stats.bytes_written, 0) << "the measurement is not the store's traffic";
  for (const fs::path& path : {first_.path(), second_.path()})
    EXPECT_EQ(std::distance(fs::directory_iterator(path / "overspill-test"), {}), 1) << "only the lock";
  const auto alone = make_file_store(file_options(first_.path(), "alone"));
  EXPECT_EQ(alone->stats().paths[0].read_bytes_per_s, 0);
  EXPECT_EQ(alone->stats().paths[0].share, 1);
}

TEST_F(Paths, SpeedsAreOnePerPath) {
  FileStoreOptions wrong = options();
  wrong.speeds.pop_back();
  EXPECT_EQ(error_of([&] { make_file_store(wrong); }).kind, ErrorKind::invalid);
}

TEST_F(Paths, AFullPathDoesNotStopTheOthers) {
  const SmallDisk small(first_.path(), 20);
  if (!small) GTEST_SKIP() << kNoMount;
  testing::internal::CaptureStderr();
  {
    const auto store = make_file_store(options());  // the small one is the fast one
    store->reserve(64 * kMiB);
    store->reserve(65 * kMiB);
    StoreStats stats = store->stats();
    EXPECT_GT(stats.paths[0].reserved_bytes, 10 * kMiB);
    EXPECT_LE(stats.paths[0].reserved_bytes, 20 * kMiB);
    EXPECT_GE(stats.reserved_bytes, 65 * kMiB);
    std::vector<Extent> extents;
    for (uint64_t i = 0; i < 60; ++i) extents.push_back(written(*store, kMiB, i));
    for (uint64_t i = 0; i < 60; ++i) expect_content(*store, extents[i], i);
    stats = store->stats();
    EXPECT_GT(stats.paths[0].bytes_written, 10 * kMiB);
    EXPECT_GT(stats.paths[1].bytes_written, 40 * kMiB);
    for (const Extent& extent : extents) store->release(extent);
    const int64_t before = stats.paths[0].bytes_written;
    for (uint64_t i = 0; i < 8; ++i) written(*store, kMiB, i);
    EXPECT_GT(store->stats().paths[0].bytes_written, before) << "room that comes back is used";
  }
  const std::string warned = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(warned, first_.path().string() + " has room for")) << warned;
  EXPECT_EQ(std::count(warned.begin(), warned.end(), '\n'), 1) << "once: " << warned;
}

TEST_F(Paths, ReserveFailsOnlyIfAllAreTooSmallTogether) {
  const SmallDisk small(first_.path(), 8);
  const SmallDisk larger(second_.path(), 100);
  if (!small || !larger) GTEST_SKIP() << kNoMount;
  const auto store = make_file_store(options({100e6, 100e6}, {100e6, 100e6}));
  const Error error = error_of([&] { store->reserve(120 * kMiB); });
  EXPECT_EQ(error.kind, ErrorKind::no_space);
  const std::string text = error.message();
  for (const fs::path& path : {first_.path(), second_.path()}) {
    EXPECT_TRUE(contains(text, path.string() + ": wanted ")) << text;
  }
  EXPECT_TRUE(contains(text, fmt::format("wanted {} bytes over 2 paths", 120 * kMiB))) << text;
  EXPECT_TRUE(contains(text, "available")) << text;
  StoreStats stats = store->stats();
  EXPECT_EQ(stats.reserved_bytes, 0) << "nothing has changed";
  for (const PathStats& path : stats.paths) EXPECT_EQ(path.reserved_bytes, 0);
  testing::internal::CaptureStderr();
  store->reserve(96 * kMiB);
  EXPECT_TRUE(contains(testing::internal::GetCapturedStderr(), "has room for"));
  stats = store->stats();
  EXPECT_LE(stats.paths[0].reserved_bytes, 8 * kMiB);
  EXPECT_GE(stats.reserved_bytes, 96 * kMiB);
}

TEST_F(Paths, TwoFoldersOfOneDiskAreNotTwiceTheRoom) {
  const SmallDisk disk(first_.path(), 60);
  if (!disk) GTEST_SKIP() << kNoMount;
  FileStoreOptions same = options(kFast, kFast);
  same.paths = {first_.path() / "a", first_.path() / "b"};
  for (const fs::path& path : same.paths) fs::create_directory(path);
  const auto store = make_file_store(same);
  const Error error = error_of([&] { store->reserve(100 * kMiB); });
  EXPECT_EQ(error.kind, ErrorKind::no_space);
  StoreStats stats = store->stats();
  for (const PathStats& path : stats.paths) {
    EXPECT_EQ(path.reserved_bytes, 0) << "what had been made is gone";
    EXPECT_EQ(std::distance(fs::directory_iterator(fs::path(path.path) / "overspill-test"), {}), 1)
        << "the lock";
  }
  store->reserve(48 * kMiB);
  EXPECT_GE(store->stats().reserved_bytes, 48 * kMiB);
}

TEST_F(Paths, APathThatCannotGrowIsClosedAndTheOthersGoOn) {
  const auto store = make_file_store(options());
  store->reserve(16 * kMiB);
  fs::remove_all(first_.path() / "overspill-test");  // as if it were unmounted
  testing::internal::CaptureStderr();
  store->reserve(64 * kMiB);
  const std::string warned = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(warned, first_.path().string() + " takes no new data")) << warned;
  const StoreStats stats = store->stats();
  EXPECT_FALSE(stats.paths[0].closed.empty());
  EXPECT_EQ(stats.paths[1].share, 1);
  EXPECT_GE(stats.paths[1].reserved_bytes, 64 * kMiB);
  for (uint64_t i = 0; i < 60; ++i) written(*store, kMiB, i);
  EXPECT_EQ(store->stats().paths[0].bytes_written, 0);
}

TEST_F(Paths, ARefusedWriteGoesToAnotherPath) {
  for (const int os_error : {ENOSPC, EDQUOT, EIO, EROFS}) {
    std::atomic<int> refuse = 0;
    FileStoreOptions faulty = options(kFast, kFast);
    faulty.patience.retry.first_wait = std::chrono::microseconds(100);
    faulty.result_hook = [&](bool writes, int64_t, int64_t, int64_t result) -> int64_t {
      return writes && refuse > 0 && refuse-- > 0 ? -os_error : result;
    };
    const auto store = make_file_store(faulty);
    store->reserve(32 * kMiB);
    const Extent kept[] = {written(*store, kMiB, 1), written(*store, kMiB, 2)};
    testing::internal::CaptureStderr();
    refuse = 1;
    const Extent moved = written(*store, kMiB, 3);
    const std::string warned = testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(warned.begin(), warned.end(), '\n'), 1) << warned;
    const StoreStats stats = store->stats();
    const auto closed = std::find_if(stats.paths.begin(), stats.paths.end(),
                                     [](const PathStats& path) { return !path.closed.empty(); });
    ASSERT_NE(closed, stats.paths.end());
    EXPECT_TRUE(contains(warned, closed->path)) << warned;
    EXPECT_EQ(stats.allocated_bytes, 3 * kMiB) << "the refused extent was given back";
    const int64_t before = closed->bytes_written;
    for (uint64_t i = 0; i < 8; ++i) written(*store, kMiB, i);
    for (const PathStats& path : store->stats().paths) {
      if (path.path != closed->path) continue;
      EXPECT_EQ(path.bytes_written, before);
    }
    expect_content(*store, kept[0], 1);
    expect_content(*store, kept[1], 2);
    expect_content(*store, moved, 3);

    // The last path has no other. What may pass is tried again there; its error is the caller's in the end.
    const bool passes = os_error != EROFS;
    AlignedMemory memory(kMiB);
    Transfer last = make_transfer(Kind::write, store->allocate(kMiB), memory.data());
    for (const int times : {1, 100}) {
      refuse = times;
      store->submit(last);
      store->drain();
      EXPECT_EQ(last.error.has_value(), !passes || times > 1);
      if (!passes || times > 1) continue;
      store->release(last.extent);
      last.extent = store->allocate(kMiB);
    }
    refuse = 0;
    ASSERT_TRUE(last.error);
    EXPECT_EQ(last.error->os_error, os_error);
    EXPECT_FALSE(write(*store, last.extent, memory)) << "and does not stick";
  }
}

int64_t threads_of_this_process() {
  return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
}

/// The first path has ended within the destructor when the second one refuses a write, which then goes to it.
TEST_F(Paths, AWriteThatIsRefusedWhileTheStoreEndsIsCancelled) {
  std::atomic<int64_t> threads = 0;  // before the end; 0: it has not begun
  FileStoreOptions own = options();
  own.threads = 1;
  own.result_hook = [&](bool, int64_t, int64_t, int64_t result) -> int64_t {
    if (threads == 0) return result;
    for (int i = 0; i < 20'000 && threads_of_this_process() >= threads; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // for what follows the end of its thread
    return -ENOSPC;
  };
  auto store = make_file_store(own);
  store->reserve(16 * kMiB);
  Extent second;
  while (second.empty() || !contains(store->file_of(second), second_.path().string()))
    second = store->allocate(kPiece);
  AlignedMemory memory(kPiece);
  Transfer transfer = make_transfer(Kind::write, second, memory.data());
  threads = threads_of_this_process();
  store->submit(transfer);
  store.reset();
  ASSERT_TRUE(transfer.error);
  EXPECT_EQ(transfer.error->kind, ErrorKind::cancelled) << transfer.error->message();
}

TEST_F(Paths, AReadErrorClosesNothing) {
  std::atomic<bool> refuse = false;
  FileStoreOptions faulty = options();
  faulty.result_hook = [&](bool writes, int64_t, int64_t, int64_t result) -> int64_t {
    return !writes && refuse ? -EIO : result;
  };
  const auto store = make_file_store(faulty);
  store->reserve(16 * kMiB);
  const Extent extent = written(*store, kMiB, 1);
  refuse = true;
  AlignedMemory memory(kMiB);
  EXPECT_EQ(read(*store, extent, memory)->kind, ErrorKind::device);
  for (const PathStats& path : store->stats().paths) EXPECT_TRUE(path.closed.empty());
}

// Two disks of 60 and 20 MB/s. Their ratio is measured, so nothing here depends on how long anything takes.
TEST_F(Paths, BytesFollowTheSpeedsOfThrottledDisks) {
  std::unique_ptr<LoopDisk> fast;
  std::unique_ptr<LoopDisk> slow;
  try {
    fast = std::make_unique<LoopDisk>(first_.path(), "fast", 192 * kMiB);
    slow = std::make_unique<LoopDisk>(first_.path(), "slow", 192 * kMiB);
    fast->throttle(60'000'000, 60'000'000);
    slow->throttle(20'000'000, 20'000'000);
  } catch (const NoLoopDisk& error) {
    GTEST_SKIP() << error.what();
  }
  FileStoreOptions two = file_options(fast->path());
  two.paths.push_back(slow->path());
  two.piece_bytes = 512 * 1024;
  two.speeds = {{1e9, 1e9}, {1e9, 1e9}};  // wrong: the run has to find out
  const auto store = make_file_store(two);
  if (store->stats().paths[0].access != "O_DIRECT")
    GTEST_SKIP() << "only O_DIRECT is throttled: " << store->stats().paths[0].access;
  store->reserve(160 * kMiB);
  AlignedMemory memory(4 * StepWorkload::kChunkBytes);
  StepWorkload workload(*store, 10, 4, memory.data());  // 50 MiB
  for (int i = 0; i < 3; ++i) workload.run();
  const StoreStats before = store->stats();
  workload.run();
  const StoreStats after = store->stats();
  std::vector<double> written;
  for (size_t i = 0; i < 2; ++i)
    written.push_back(static_cast<double>(after.paths[i].bytes_written - before.paths[i].bytes_written));
  EXPECT_NEAR(written[0] / (written[0] + written[1]), 0.75, 0.2);
  EXPECT_NEAR(after.paths[0].share, 0.75, 0.2) << fmt::format(
      "read {:.3g} and {:.3g}, write {:.3g} and {:.3g} bytes/s", after.paths[0].read_bytes_per_s,
      after.paths[1].read_bytes_per_s, after.paths[0].write_bytes_per_s, after.paths[1].write_bytes_per_s);
}

}  // namespace
}  // namespace overspill::io
