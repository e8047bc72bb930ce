// What only a store on disk can do wrong: files, locks, limits, the kernel's refusals.
#include "io/file_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <mutex>
#include <thread>
#include <vector>

#include "io/job_folder.h"
#include "io/unique_fd.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

using Kind = Transfer::Kind;
using Backend = FileStoreOptions::Backend;
namespace fs = std::filesystem;

// For both backends, since each has its own way to the kernel.
class FileStoreTest : public testing::TestWithParam<Backend> {
 protected:
  FileStoreOptions options(const std::string& job = "test") const {
    FileStoreOptions options = file_options(folder_.path(), job);
    options.backend = GetParam();
    return options;
  }
  std::unique_ptr<Store> open(const FileStoreOptions& options) {
    try {
      auto store = make_file_store(options);
      store->reserve(8 * kMiB);
      return store;
    } catch (const StoreError& error) {
      if (error.error().kind != ErrorKind::unsupported) throw;
      return nullptr;
    }
  }
  fs::path slab(int number) const {
    return folder_.path() / "overspill-test" / fmt::format("slab-{}.bin", number);
  }

  ScratchFolder folder_;
};

#define OPEN_OR_SKIP(store, ...)        \
  const auto store = open(__VA_ARGS__); \
  if (store == nullptr) GTEST_SKIP() << "the kernel refuses io_uring"

// Bytes on disk are changed behind the store's back, past any cache of an O_DIRECT reader.
void change_byte(const fs::path& path, int64_t offset) {
  const UniqueFd fd(::open(path.c_str(), O_RDWR));
  char byte = 0;
  ASSERT_EQ(::pread(fd.get(), &byte, 1, offset), 1);
  byte ^= 0x10;
  ASSERT_EQ(::pwrite(fd.get(), &byte, 1, offset), 1);
  ASSERT_EQ(::fsync(fd.get()), 0);
}

TEST_P(FileStoreTest, FlippedBitOnDiskIsCaught) {
  OPEN_OR_SKIP(store, options());
  written(*store, 256 * 1024, 1);
  const Extent extent = written(*store, 300 * 1024, 2);
  const int64_t at = extent.offset + 200 * 1024;
  change_byte(slab(static_cast<int>(extent.slab)), at);
  AlignedMemory memory(extent.bytes);
  const auto error = read(*store, extent, memory);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::corrupt);
  EXPECT_EQ(error->path, slab(static_cast<int>(extent.slab)));
  EXPECT_EQ(error->offset_bytes, extent.offset + 192 * 1024) << "the 64 KiB block that holds it";
  EXPECT_EQ(error->length_bytes, kChecksumBlockBytes);
  EXPECT_TRUE(contains(error->message(), "checksum")) << error->message();
}

TEST_P(FileStoreTest, TruncatedSlabIsNamed) {
  OPEN_OR_SKIP(store, options());
  const Extent extent = written(*store, kMiB, 1);
  fs::resize_file(slab(0), static_cast<uint64_t>(extent.offset + kMiB / 2 + 100));
  AlignedMemory memory(extent.bytes);
  const auto error = read(*store, extent, memory);
  ASSERT_TRUE(error);
  EXPECT_TRUE(error->kind == ErrorKind::truncated || error->kind == ErrorKind::corrupt) << error->message();
  EXPECT_EQ(error->kind, ErrorKind::truncated) << error->message();
}

TEST_P(FileStoreTest, FilesAreTheOwnersAndGoAway) {
  const fs::path job = folder_.path() / "overspill-test";
  {
    OPEN_OR_SKIP(store, options());
    for (const auto& entry : fs::directory_iterator(job)) {
      struct stat info {};
      ASSERT_EQ(::stat(entry.path().c_str(), &info), 0);
      EXPECT_EQ(info.st_mode & 0777, 0600U) << entry.path();
    }
  }
  EXPECT_FALSE(fs::exists(job));
}

TEST_P(FileStoreTest, SecondRunOfAJobIsRefused) {
  OPEN_OR_SKIP(store, options());
  const Extent extent = written(*store, kMiB, 1);
  const Error error = error_of([&] { make_file_store(options()); });
  EXPECT_EQ(error.kind, ErrorKind::locked);
  EXPECT_TRUE(contains(error.message(), std::to_string(::getpid()))) << error.message();
  EXPECT_TRUE(contains(error.message(), "another job name")) << error.message();
  const auto other = make_file_store(options("other"));
  other->reserve(kMiB);
  AlignedMemory memory(extent.bytes);
  EXPECT_FALSE(read(*store, extent, memory)) << "the refused run touched nothing";
}

TEST_P(FileStoreTest, LeftoversOfADeadRunGo) {
  const fs::path job = folder_.path() / "overspill-test";
  const int status = exit_status_of([&] {
    const auto store = open(options());
    if (store == nullptr) return 77;
    ::_exit(0);  // dies without a destructor
    return 0;
  });
  if (status == 77) GTEST_SKIP() << "the kernel refuses io_uring";
  ASSERT_EQ(status, 0);
  ASSERT_TRUE(fs::exists(slab(1)));
  fs::create_directory(folder_.path() / "overspill-other");
  std::ofstream(folder_.path() / "overspill-other" / "slab-0.bin") << "another job's";
  std::ofstream(job / "notes.txt") << "not the store's";
  const auto store = make_file_store(options());
  EXPECT_FALSE(fs::exists(slab(0)));
  EXPECT_FALSE(fs::exists(slab(1)));
  EXPECT_TRUE(fs::exists(folder_.path() / "overspill-other" / "slab-0.bin"));
  EXPECT_TRUE(fs::exists(job / "notes.txt"));
}

TEST_P(FileStoreTest, LeftoversOfADeadRunOfAnotherJobGoButNotThoseOfALiveOne) {
  const int status = exit_status_of([&] {
    const auto store = open(options("dead"));
    if (store == nullptr) return 77;
    ::_exit(0);  // dies without a destructor
    return 0;
  });
  if (status == 77) GTEST_SKIP() << "the kernel refuses io_uring";
  ASSERT_EQ(status, 0);
  ASSERT_TRUE(fs::exists(folder_.path() / "overspill-dead" / "lock"));
  const auto live = make_file_store(options("live"));
  EXPECT_FALSE(fs::exists(folder_.path() / "overspill-dead"));
  const auto store = make_file_store(options());
  EXPECT_TRUE(fs::exists(folder_.path() / "overspill-live" / "lock"));
}

// Ranks of one machine: each looks, while others start, for what dead runs left.
TEST(JobFolders, OfOnePathAreMadeAtTheSameTime) {
  const ScratchFolder folder;
  std::mutex mutex;
  std::vector<std::string> errors;
  std::vector<std::thread> starters;
  for (int starter = 0; starter < 4; ++starter) {
    starters.emplace_back([&, starter] {
      for (int i = 0; i < 200; ++i) {
        try {
          const JobFolder made(folder.path(), fmt::format("rank{}", starter), false);
        } catch (const StoreError& error) {
          const std::lock_guard guard(mutex);
          errors.emplace_back(error.what());
        }
      }
    });
  }
  for (std::thread& starter : starters) starter.join();
  EXPECT_TRUE(errors.empty()) << errors.size() << " of 800, the first: " << errors.front();
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(JobFolders, WaitForWhoeverRemovesWhatADeadRunOfTheirNameLeft) {
  const ScratchFolder folder;
  const fs::path lock_path = folder.path() / "overspill-again" / "lock";
  fs::create_directory(lock_path.parent_path());
  std::ofstream(lock_path) << "removing";
  UniqueFd lock(::open(lock_path.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
  std::thread remover([&] {
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1500));  // longer than a lock that says nothing is waited for
    fs::remove(lock_path);
    // As a run that removes a dead one does: the folder stays where the other has a new lock in it by now.
    std::error_code has_a_new_lock;
    fs::remove(lock_path.parent_path(), has_a_new_lock);
    lock = UniqueFd();
  });
  EXPECT_NO_THROW(const JobFolder made(folder.path(), "again", false));
  remover.join();
}

TEST_P(FileStoreTest, MissingPathAndBadJobAreNamed) {
  FileStoreOptions missing = options();
  missing.paths = {folder_.path() / "not-there"};
  const Error error = error_of([&] { make_file_store(missing); });
  EXPECT_EQ(error.kind, ErrorKind::vanished);
  EXPECT_TRUE(contains(error.message(), "not-there")) << error.message();
  EXPECT_TRUE(contains(error.message(), "create the folder")) << error.message();
  for (const char* job : {"", "..", "a/b", ".hidden"}) {
    EXPECT_EQ(error_of([&] { make_file_store(options(job)); }).kind, ErrorKind::invalid) << job;
  }
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_P(FileStoreTest, FileSizeLimitRefusesTheReservation) {
  OPEN_OR_SKIP(store, options());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(kMiB);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  const Error error = error_of([&] { store->reserve(64 * kMiB); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(error.kind, ErrorKind::quota);
  EXPECT_EQ(store->stats().reserved_bytes, 8 * kMiB);
  EXPECT_FALSE(fs::exists(slab(2)));
  store->reserve(12 * kMiB);
  EXPECT_EQ(store->stats().reserved_bytes, 12 * kMiB);
}

TEST_P(FileStoreTest, FullDiskLeavesNothingChanged) {
  if (::geteuid() != 0) GTEST_SKIP() << "mounting a small tmpfs takes root";
  if (::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, "size=20m") != 0)
    GTEST_SKIP() << "mounts are refused here";
  {
    const auto store = open(options());
    if (store != nullptr) {
      const Error error = error_of([&] { store->reserve(64 * kMiB); });
      EXPECT_EQ(error.kind, ErrorKind::no_space);
      EXPECT_TRUE(contains(error.message(), folder_.path().string())) << error.message();
      EXPECT_TRUE(contains(error.message(), std::to_string(56 * kMiB) + " bytes")) << error.message();
      EXPECT_TRUE(contains(error.message(), "available")) << error.message();
      EXPECT_EQ(store->stats().reserved_bytes, 8 * kMiB);
      EXPECT_FALSE(fs::exists(slab(2)));
      store->reserve(16 * kMiB);  // what was made for the failed reservation is gone
      for (int i = 0; i < 4; ++i) written(*store, 4 * kMiB, 1);
    }
  }
  EXPECT_EQ(::umount(folder_.path().c_str()), 0);
}

TEST_P(FileStoreTest, ShortAndInterruptedTransfersContinue) {
  std::atomic<int> calls = 0;
  FileStoreOptions faulty = options();
  faulty.result_hook = [&](bool, int64_t, int64_t asked, int64_t result) -> int64_t {
    switch (calls++ % 4) {
      case 0:
        return -EINTR;
      case 1:
        return -EAGAIN;
      case 2:
        return asked > kBlockBytes ? kBlockBytes + 100 : result;  // not at a block boundary
      default:
        return result;
    }
  };
  OPEN_OR_SKIP(store, faulty);
  const Extent extent = written(*store, kMiB, 5);
  AlignedMemory expected(kMiB);
  expected.fill(5);
  AlignedMemory found(kMiB);
  const auto error = read(*store, extent, found);
  ASSERT_FALSE(error) << error->message();
  EXPECT_TRUE(found == expected);
  EXPECT_GE(store->stats().retries, 16);
  EXPECT_GE(store->stats().paths[0].retries.shortages, 4) << "EAGAIN";
}

TEST_P(FileStoreTest, EveryErrnoBecomesATypedError) {
  std::atomic<int> os_error = 0;
  FileStoreOptions faulty = options();
  faulty.patience.retry.first_wait = std::chrono::microseconds(100);
  faulty.result_hook = [&](bool, int64_t, int64_t, int64_t result) -> int64_t {
    return os_error ? -os_error : result;
  };
  OPEN_OR_SKIP(store, faulty);
  const Extent extent = written(*store, kMiB, 5);
  AlignedMemory memory(kMiB);
  const std::pair<int, ErrorKind> expected[] = {
      {EIO, ErrorKind::device},       {ENOSPC, ErrorKind::no_space}, {EDQUOT, ErrorKind::quota},
      {ESTALE, ErrorKind::vanished},  {EAGAIN, ErrorKind::busy},     {EROFS, ErrorKind::denied},
      {ENOMEM, ErrorKind::no_memory}, {EINVAL, ErrorKind::invalid},  {9999, ErrorKind::device}};
  for (const auto& [number, kind] : expected) {
    os_error = number;
    const auto error = read(*store, extent, memory);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind, kind) << number;
    EXPECT_EQ(error->os_error, number);
    EXPECT_EQ(error->message().find("has stopped all writes") != std::string::npos, number == EROFS);
    EXPECT_EQ(error->path, slab(0));
    Transfer fresh = make_transfer(Transfer::Kind::write, store->allocate(kMiB), memory.data());
    for (const bool fails : {true, false}) {
      store->submit(fresh);
      store->drain();
      EXPECT_EQ(fresh.error.has_value(), fails) << "a failed write may be tried again";
      if (fails) {
        EXPECT_EQ(fresh.error->kind, kind);
      }
      os_error = 0;
    }
    store->release(fresh.extent);
  }
  EXPECT_FALSE(read(*store, extent, memory)) << "errors do not stick";
}

TEST_P(FileStoreTest, TransfersThatMoveNothingEnd) {
  std::atomic<bool> nothing = false;
  FileStoreOptions faulty = options();
  faulty.result_hook = [&](bool, int64_t, int64_t, int64_t result) { return nothing ? 0 : result; };
  OPEN_OR_SKIP(store, faulty);
  const Extent extent = written(*store, kMiB, 5);
  AlignedMemory memory(kMiB);
  nothing = true;
  EXPECT_EQ(read(*store, extent, memory)->kind, ErrorKind::truncated);
  EXPECT_EQ(write(*store, store->allocate(kMiB), memory)->kind, ErrorKind::device);
}

struct Order {
  std::mutex mutex;
  std::vector<int> finished;
};

TEST_P(FileStoreTest, DemandOvertakesReadAheadAndWriteBehind) {
  std::mutex gate;
  FileStoreOptions narrow = options();
  narrow.queue_depth = 1;
  narrow.threads = 1;
  narrow.result_hook = [&](bool, int64_t, int64_t, int64_t result) {
    const std::lock_guard wait_until_open(gate);
    return result;
  };
  OPEN_OR_SKIP(store, narrow);
  std::vector<Extent> extents;
  for (int i = 0; i < 3; ++i) extents.push_back(written(*store, kMiB, 1));
  AlignedMemory memory(4 * kMiB);
  struct Entry {
    Order* order;
    int priority;
  };
  Order order;
  Entry entries[] = {{&order, 0}, {&order, 1}, {&order, 2}};
  std::vector<Transfer> transfers;
  for (const int priority : {2, 1, 0}) {  // the least urgent first; all wait behind the gate
    transfers.push_back(
        make_transfer(priority == 2 ? Kind::write : Kind::read,
                      priority == 2 ? store->allocate(kMiB) : extents[static_cast<size_t>(priority)],
                      memory.data() + priority * kMiB));
    transfers.back().priority = static_cast<Transfer::Priority>(priority);
    transfers.back().context = &entries[priority];
    transfers.back().on_complete = [](Transfer& transfer) noexcept {
      const auto& entry = *static_cast<Entry*>(transfer.context);
      const std::lock_guard lock(entry.order->mutex);
      entry.order->finished.push_back(entry.priority);
    };
  }
  {
    const std::lock_guard closed(gate);
    for (Transfer& transfer : transfers) store->submit(transfer);
  }
  store->drain();
  EXPECT_EQ(order.finished, (std::vector{0, 1, 2}));
}

TEST_P(FileStoreTest, QueuedTransfersAreCancelledAtTheEnd) {
  std::mutex gate;
  FileStoreOptions narrow = options();
  narrow.queue_depth = 1;
  narrow.result_hook = [&](bool, int64_t, int64_t, int64_t result) {
    const std::lock_guard wait_until_open(gate);
    return result;
  };
  auto store = open(narrow);
  if (store == nullptr) GTEST_SKIP() << "the kernel refuses io_uring";
  AlignedMemory memory(kMiB);
  std::vector<Transfer> transfers;
  for (int i = 0; i < 6; ++i)
    transfers.push_back(make_transfer(Kind::write, store->allocate(kMiB), memory.data()));
  std::thread closing;
  {
    const std::lock_guard closed(gate);
    for (Transfer& transfer : transfers) store->submit(transfer);
    closing = std::thread([&] { store.reset(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  closing.join();
  EXPECT_TRUE(transfers.back().error);
  for (const Transfer& transfer : transfers) {
    if (!transfer.error) continue;
    EXPECT_EQ(transfer.error->kind, ErrorKind::cancelled) << transfer.error->message();
  }
}

TEST_P(FileStoreTest, SeveralPathsShareTheLoad) {
  const ScratchFolder second;
  FileStoreOptions two = options();
  two.paths.push_back(second.path());
  two.speeds = {{1e9, 1e9}, {1e9, 1e9}};
  OPEN_OR_SKIP(store, two);
  EXPECT_TRUE(fs::exists(folder_.path() / "overspill-test"));
  std::vector<Extent> extents;
  for (uint64_t i = 0; i < 8; ++i) extents.push_back(written(*store, kMiB, i));
  EXPECT_NE(extents[0].slab, extents[1].slab) << "neighbours lie on different disks";
  const auto slabs_on = [](const fs::path& path) {
    return std::distance(fs::directory_iterator(path / "overspill-test"), {});
  };
  EXPECT_EQ(slabs_on(folder_.path()), slabs_on(second.path()));
  for (uint64_t i = 0; i < 8; ++i) {
    AlignedMemory expected(kMiB);
    expected.fill(i);
    AlignedMemory found(kMiB);
    ASSERT_FALSE(read(*store, extents[i], found));
    EXPECT_TRUE(found == expected);
  }
}

TEST_P(FileStoreTest, ExportLinksWhereItCanAndCopiesWhereNot) {
  OPEN_OR_SKIP(store, options());
  const Extent extents[] = {written(*store, kMiB, 1), written(*store, 70 * 1024, 2)};
  const auto linked = store->export_extents(extents, folder_.path()).extents;
  EXPECT_EQ(linked[0].file, fmt::format("slab-test-{}.bin", extents[0].slab));
  EXPECT_EQ(fs::hard_link_count(folder_.path() / linked[0].file), 2U);
  EXPECT_EQ(store->export_extents(extents, folder_.path()).extents[0].file, linked[0].file)
      << "again is the same file";
  const Error error = error_of([&] { store->export_extents(extents, folder_.path() / "not-there"); });
  EXPECT_EQ(error.kind, ErrorKind::vanished);

  std::error_code refused;
  if (!fs::is_directory("/dev/shm", refused) || ::access("/dev/shm", W_OK) != 0) return;
  const ScratchFolder elsewhere("/dev/shm");
  const auto copied = store->export_extents(extents, elsewhere.path()).extents;
  EXPECT_EQ(copied[0].file, "extents-test-0.bin");
  EXPECT_EQ(copied[1].offset, kMiB);
  EXPECT_EQ(fs::file_size(elsewhere.path() / copied[0].file), static_cast<uintmax_t>(kMiB + 72 * 1024));
  change_byte(slab(static_cast<int>(extents[0].slab)), extents[0].offset + 5);
  EXPECT_EQ(error_of([&] { store->export_extents(extents, elsewhere.path()); }).kind, ErrorKind::corrupt);
  EXPECT_FALSE(fs::exists(elsewhere.path() / "extents-test-1.bin")) << "a failed export leaves nothing";
}

TEST_P(FileStoreTest, RegisteredMemoryIsUsedAndDropped) {
  OPEN_OR_SKIP(store, options());
  AlignedMemory memory(4 * kMiB);
  store->register_memory(memory.all());
  const Extent extent = store->allocate(kMiB);
  memory.fill(3);
  ASSERT_FALSE(run(*store, Kind::write, extent, memory.data() + kMiB));
  ASSERT_FALSE(run(*store, Kind::read, extent, memory.data() + 2 * kMiB));
  EXPECT_EQ(std::memcmp(memory.data() + kMiB, memory.data() + 2 * kMiB, static_cast<size_t>(kMiB)), 0);
  store->unregister_memory(memory.all());
  ASSERT_FALSE(run(*store, Kind::read, extent, memory.data()));
}

INSTANTIATE_TEST_SUITE_P(Both, FileStoreTest, testing::Values(Backend::uring, Backend::threads),
                         [](const auto& param) {
                           return param.param == Backend::uring ? "uring" : "threads";
                         });

}  // namespace
}  // namespace overspill::io
