// What is tried again, how often and when: the queue with a clock that is played, and the store on a disk
// under both backends.
#include "io/patience.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/piece_queue.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

using std::chrono::milliseconds;
using Kind = Transfer::Kind;

class PlayedQueue : public testing::Test, private TransferOwner {
 protected:
  Transfer& push(Kind kind) {
    transfer_ =
        make_transfer(kind, {.slab = 0, .generation = 1, .offset = 0, .bytes = kPiece}, memory_.data());
    queue_.push(transfer_);
    return transfer_;
  }
  /// The next piece is answered with this; false where none is to be had.
  bool answer(int64_t result) {
    Piece piece;
    if (!queue_.next(piece)) return false;
    EXPECT_TRUE(queue_.settle(piece, result));
    return true;
  }

  milliseconds now_{0};
  PieceQueue queue_{
      *this, 8, kPiece, nullptr, {.tries_max = 3, .first_wait = milliseconds(10), .growth = 3}, [this] {
        return now_;
      }};
  std::vector<Transfer*> completed_;
  std::vector<std::string> told_;

 private:
  Target locate(const Transfer&) override { return {.fd = -1, .slab = 0, .sums = sums_}; }
  std::string path_of(const Target&) override { return "played"; }
  void first_retry(const Error& why) noexcept override { told_.push_back(why.cause()); }
  void completed(Transfer& transfer) noexcept override { completed_.push_back(&transfer); }

  AlignedMemory memory_{kPiece};
  std::vector<uint64_t> sums_ = std::vector<uint64_t>(1);
  Transfer transfer_;
};

TEST_F(PlayedQueue, WaitsLongerBeforeEachTryAndEndsWithAnErrorThatSaysHowOften) {
  const Transfer& transfer = push(Kind::read);
  for (const milliseconds wait : {milliseconds(10), milliseconds(30), milliseconds(90)}) {
    ASSERT_TRUE(answer(-EIO));
    EXPECT_EQ(queue_.next_try_in(), wait);
    now_ += wait - milliseconds(1);
    EXPECT_FALSE(answer(-EIO)) << "too early";
    EXPECT_TRUE(completed_.empty());
    now_ += milliseconds(1);
  }
  ASSERT_TRUE(answer(-EIO));
  ASSERT_EQ(completed_.size(), 1U);
  EXPECT_EQ(transfer.error->kind, ErrorKind::device);
  EXPECT_TRUE(contains(transfer.error->message(), "tried 4 times")) << transfer.error->message();
  EXPECT_EQ(queue_.retries().reads, 3);
  EXPECT_EQ(told_.size(), 1U) << "once";
  EXPECT_FALSE(queue_.has_work());
}

TEST_F(PlayedQueue, AWriteThatIsToBeMadeElsewhereWaitsAsLongAndIsRefusedInTheEnd) {
  Transfer& transfer = push(Kind::write);
  for (const milliseconds wait : {milliseconds(10), milliseconds(30), milliseconds(90)}) {
    ASSERT_TRUE(answer(-EIO));
    ASSERT_TRUE(transfer.error);
    const Error why = *std::exchange(transfer.error, std::nullopt);
    ASSERT_TRUE(queue_.push_later(transfer, why));
    EXPECT_EQ(queue_.next_try_in(), wait);
    now_ += wait - milliseconds(1);
    EXPECT_FALSE(queue_.has_work());
    EXPECT_FALSE(answer(-EIO)) << "too early";
    now_ += milliseconds(1);
    EXPECT_TRUE(queue_.has_work());
  }
  ASSERT_TRUE(answer(-EIO));
  EXPECT_FALSE(queue_.push_later(transfer, *transfer.error));
  EXPECT_EQ(queue_.retries().writes, 3);
  EXPECT_EQ(told_.size(), 1U) << "once";
  EXPECT_FALSE(queue_.next_try_in());
}

TEST_F(PlayedQueue, AWriteThatWaitsEndsWithTheQueue) {
  Transfer& transfer = push(Kind::write);
  ASSERT_TRUE(answer(-EIO));
  ASSERT_TRUE(queue_.push_later(transfer, *std::exchange(transfer.error, std::nullopt)));
  queue_.stop();
  EXPECT_TRUE(queue_.has_work());
  EXPECT_FALSE(answer(kPiece)) << "it is cancelled";
  ASSERT_EQ(completed_.size(), 2U);
  EXPECT_EQ(transfer.error->kind, ErrorKind::cancelled);
  EXPECT_FALSE(queue_.push_later(transfer, *transfer.error)) << "nothing waits any more";
}

TEST_F(PlayedQueue, AWriteThatWaitsEndsWhereTheQueueIsGivenUp) {
  Transfer& transfer = push(Kind::write);
  ASSERT_TRUE(answer(-EIO));
  ASSERT_TRUE(queue_.push_later(transfer, *std::exchange(transfer.error, std::nullopt)));
  queue_.give_up({.kind = ErrorKind::device, .detail = "given up"});
  queue_.fail_all();
  ASSERT_EQ(completed_.size(), 2U);
  EXPECT_EQ(transfer.error->detail, "given up");
}

TEST_F(PlayedQueue, AWriteIsTriedAgainInItsPlaceWhereTheMachineIsShortOfSomethingOnly) {
  const Transfer& transfer = push(Kind::write);
  for (const int os_error : {ENOMEM, EAGAIN}) {
    ASSERT_TRUE(answer(-os_error));
    now_ += milliseconds(90);
  }
  ASSERT_TRUE(answer(kPiece));
  ASSERT_EQ(completed_.size(), 1U);
  EXPECT_FALSE(transfer.error);
  EXPECT_EQ(queue_.retries().shortages, 2);

  push(Kind::write);
  ASSERT_TRUE(answer(-EIO));
  ASSERT_EQ(completed_.size(), 2U);
  EXPECT_EQ(transfer.error->os_error, EIO);
}

TEST_F(PlayedQueue, WhatDiffersFromItsChecksumIsReadOnceMore) {
  const Transfer& transfer = push(Kind::read);  // nothing was ever written there: the checksum is 0
  ASSERT_TRUE(answer(kPiece));
  EXPECT_TRUE(completed_.empty());
  now_ += milliseconds(10);
  ASSERT_TRUE(answer(kPiece));
  ASSERT_EQ(completed_.size(), 1U);
  EXPECT_EQ(transfer.error->kind, ErrorKind::corrupt);
  EXPECT_EQ(queue_.retries().checksums, 1);
}

TEST_F(PlayedQueue, NothingWaitsOnceItIsStopped) {
  const Transfer& transfer = push(Kind::read);
  ASSERT_TRUE(answer(-EIO));
  queue_.stop();
  EXPECT_TRUE(queue_.has_work());
  ASSERT_TRUE(answer(-EIO));
  EXPECT_EQ(transfer.error->os_error, EIO);
}

TEST(Patience, TheMachinesMemoryIsNotBlamedOnTheDisk) {
  const Error error{.kind = kind_of_errno(ENOMEM), .os_error = ENOMEM};
  EXPECT_FALSE(contains(error.message(), "smartctl")) << error.message();
  EXPECT_TRUE(contains(error.message(), "memory")) << error.message();
}

class PatientStore : public testing::TestWithParam<FileStoreOptions::Backend> {
 protected:
  /// The next `failures_` reads, or writes, end with `os_error_`; then none.
  FileStoreOptions options() {
    FileStoreOptions faulty = file_options(folder_.path());
    faulty.backend = GetParam();
    faulty.result_hook = [this](bool writes, int64_t, int64_t, int64_t result) -> int64_t {
      return writes == writes_fail_ && failures_ > 0 && failures_-- > 0 ? -os_error_ : result;
    };
    return faulty;
  }

  ScratchFolder folder_;
  /// Returns when it is over.
  static void run(Store& store, Transfer& transfer) {
    store.submit(transfer);
    store.drain();
  }

  std::atomic<bool> writes_fail_ = false;
  std::atomic<int> failures_ = 0;
  std::atomic<int> os_error_ = EIO;
};

TEST_P(PatientStore, AWriteThatFailsOnceOrTenTimesIsMadeInAnotherPlaceAndOneThatFailsForEverIsTyped) {
  FileStoreOptions patient = options();
  patient.patience.retry.first_wait = std::chrono::microseconds(100);
  std::unique_ptr<Store> store;
  try {
    store = make_file_store(patient);
  } catch (const StoreError& error) {
    GTEST_SKIP() << error.what();
  }
  writes_fail_ = true;
  store->reserve(4 * kMiB);
  AlignedMemory memory(kPiece), found(kPiece);
  testing::internal::CaptureStderr();
  int64_t tried = 0;
  for (const int os_error : {EIO, ETIMEDOUT, ENOSPC, EDQUOT}) {
    os_error_ = os_error;
    for (const int failures : {1, 10, 11}) {
      memory.fill(static_cast<uint64_t>(os_error) + static_cast<uint64_t>(failures));
      const Extent first = store->allocate(kPiece);
      Transfer transfer = make_transfer(Kind::write, first, memory.data());
      failures_ = failures;
      run(*store, transfer);
      EXPECT_EQ(store->stats().allocated_bytes, kPiece) << "the places that failed were given back";
      EXPECT_EQ(store->stats().paths[0].retries.writes - tried, std::min(failures, 10));
      tried = store->stats().paths[0].retries.writes;
      if (failures == 1) {
        EXPECT_NE(transfer.extent, first) << "it may be bad there";
      }
      if (failures == 11) {
        ASSERT_TRUE(transfer.error);
        EXPECT_EQ(transfer.error->os_error, os_error);
        EXPECT_TRUE(contains(transfer.error->message(), "tried 11 times")) << transfer.error->message();
        run(*store, transfer);
      }
      ASSERT_FALSE(transfer.error) << transfer.error->message();
      ASSERT_FALSE(read(*store, transfer.extent, found));
      EXPECT_TRUE(found == memory);
      store->release(transfer.extent);
    }
  }
  os_error_ = EROFS;
  failures_ = 1;
  EXPECT_TRUE(write(*store, store->allocate(kPiece), memory)) << "that does not pass";
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 1) << told;
  EXPECT_TRUE(contains(told, folder_.path().string())) << told;
}

TEST_P(PatientStore, AWriteThatFailsWhereNothingElseIsFreeIsMadeInTheSamePlace) {
  std::unique_ptr<Store> store;
  try {
    store = make_file_store(options());
  } catch (const StoreError& error) {
    GTEST_SKIP() << error.what();
  }
  writes_fail_ = true;
  store->reserve(kPiece);
  AlignedMemory memory(kPiece), found(kPiece);
  memory.fill(5);
  const Extent only = store->allocate(kPiece);
  failures_ = 2;
  Transfer transfer = make_transfer(Kind::write, only, memory.data());
  run(*store, transfer);
  ASSERT_FALSE(transfer.error) << transfer.error->message();
  EXPECT_EQ(transfer.extent, only);
  ASSERT_FALSE(read(*store, only, found));
  EXPECT_TRUE(found == memory);
}

TEST_P(PatientStore, AReadThatFailsOnceOrTenTimesSucceedsAndOneThatFailsForEverIsTyped) {
  std::unique_ptr<Store> store;
  try {
    store = make_file_store(options());
  } catch (const StoreError& error) {
    GTEST_SKIP() << error.what();
  }
  store->reserve(4 * kMiB);
  const Extent extent = store->allocate(kPiece);
  AlignedMemory memory(kPiece);
  memory.fill(3);
  ASSERT_FALSE(write(*store, extent, memory));
  AlignedMemory found(kPiece);
  testing::internal::CaptureStderr();
  int64_t before = 0;
  for (const int failures : {1, 10}) {
    failures_ = failures;
    const auto error = read(*store, extent, found);
    ASSERT_FALSE(error) << error->message();
    EXPECT_TRUE(found == memory);
    EXPECT_EQ(store->stats().paths[0].retries.reads - before, failures);
    before = store->stats().paths[0].retries.reads;
  }
  failures_ = 1 << 30;
  const auto error = read(*store, extent, found);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::device);
  EXPECT_EQ(error->length_bytes, kPiece);
  EXPECT_TRUE(contains(error->message(), "tried 11 times")) << error->message();
  failures_ = 0;
  EXPECT_FALSE(read(*store, extent, found)) << "errors do not stick";
  store.reset();  // its threads have said what they had to say
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 1) << told;
  EXPECT_TRUE(contains(told, folder_.path().string())) << told;
}

// One piece waits for its next try for longer than the test may take, others pass it by: nobody sleeps for
// it.
TEST_P(PatientStore, WhoWaitsForAnotherTryHoldsNobodyUp) {
  FileStoreOptions patient = options();
  patient.threads = 1;
  patient.queue_depth = 2;
  patient.patience.retry.first_wait = std::chrono::hours(1);
  std::unique_ptr<Store> store;
  try {
    store = make_file_store(patient);
  } catch (const StoreError& error) {
    GTEST_SKIP() << error.what();
  }
  store->reserve(4 * kMiB);
  const Extent extent = store->allocate(kPiece);
  AlignedMemory memory(kPiece);
  ASSERT_FALSE(write(*store, extent, memory));
  failures_ = 1;
  AlignedMemory other(kPiece);
  Transfer waits = make_transfer(Kind::read, extent, other.data());
  store->submit(waits);
  while (store->stats().paths[0].retries.reads == 0) std::this_thread::yield();
  for (int i = 0; i < 20; ++i) {
    Transfer passes = make_transfer(Kind::read, extent, memory.data());
    std::atomic<bool> done = false;
    passes.context = &done;
    passes.on_complete = [](Transfer& t) noexcept { *static_cast<std::atomic<bool>*>(t.context) = true; };
    store->submit(passes);
    while (!done) std::this_thread::yield();
    EXPECT_FALSE(passes.error);
  }
  store.reset();  // at its end nothing waits any more
  EXPECT_FALSE(waits.error && waits.error->kind != ErrorKind::cancelled);
}

INSTANTIATE_TEST_SUITE_P(Backends, PatientStore,
                         testing::Values(FileStoreOptions::Backend::uring,
                                         FileStoreOptions::Backend::threads),
                         [](const auto& info) {
                           return info.param == FileStoreOptions::Backend::uring ? "io_uring" : "threads";
                         });

}  // namespace
}  // namespace overspill::io
