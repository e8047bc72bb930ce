// Checking where the bytes are used: nothing unverified is given out, nothing unverified goes back.
#include "io/sealed.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "io/checksum.h"
#include "io/memory_store.h"
#include "io/unique_fd.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

using Kind = Transfer::Kind;
constexpr int64_t kBlock = kChecksumBlockBytes;
constexpr int64_t kBytes = 4 * kBlock + kBlockBytes;  // pieces of 128 KiB, a short last block

class SealedTest : public testing::TestWithParam<bool> {
 protected:
  SealedTest() : memory_(kBytes) {
    if (GetParam()) {
      store_ = make_file_store(file_options(folder_.path()));
    } else {
      store_ = make_memory_store(64 << 20, {}, 128 << 10);
    }
    store_->reserve(16 << 20);
    extent_ = store_->allocate(kBytes);
    memory_.fill(1);
  }

  void fill_and_write() {
    sealed_.start(memory_.data(), kBytes);
    ASSERT_EQ(sealed_.open(*store_, 0, kBytes), memory_.data());
    sealed_.seal(0, kBytes);
    write_back();
  }

  void write_back() {
    extent_ = store_->allocate(kBytes);  // an extent is written once
    Transfer transfer = make_transfer(Kind::write, extent_, nullptr);
    sealed_.hand_over(transfer);
    store_->submit(transfer);
    store_->drain();
    ASSERT_FALSE(transfer.error) << transfer.error->message();
  }

  std::optional<Error> fetch(AlignedMemory& to) {
    Transfer transfer = make_transfer(Kind::read, extent_, to.data());
    sealed_.expect(transfer);
    store_->submit(transfer);
    store_->drain();
    return transfer.error;
  }

  /// One bit of the extent, where it is stored.
  void flip_at_rest(int64_t at) {
    if (auto* played = dynamic_cast<MemoryStore*>(store_.get())) return played->flip_bit(extent_, at * 8 + 4);
    const UniqueFd file(::open(store_->file_of(extent_).c_str(), O_RDWR | O_CLOEXEC));
    std::byte one{};
    ASSERT_EQ(::pread(file.get(), &one, 1, extent_.offset + at), 1);
    one ^= std::byte{0x10};
    ASSERT_EQ(::pwrite(file.get(), &one, 1, extent_.offset + at), 1);
  }

  ScratchFolder folder_;
  std::unique_ptr<Store> store_;
  AlignedMemory memory_;
  Extent extent_;
  Sealed sealed_{kBytes};
};

TEST_P(SealedTest, BytesTravelThereAndBack) {
  fill_and_write();
  AlignedMemory found(kBytes);
  ASSERT_FALSE(fetch(found));
  EXPECT_EQ(sealed_.open(*store_, 0, 2 * kBlock), found.data());
  EXPECT_EQ(sealed_.open(*store_, 2 * kBlock, kBytes), found.data() + 2 * kBlock);
  EXPECT_TRUE(found == memory_);

  // A block at a time, changed, and read again by the store itself.
  ASSERT_FALSE(fetch(found));
  for (int64_t at = 0; at < kBytes; at += kBlock) {
    const int64_t end = std::min(at + kBlock, kBytes);
    *sealed_.open(*store_, at, end) ^= std::byte{1};
    memory_.data()[at] ^= std::byte{1};
    sealed_.seal(at, end);
  }
  write_back();
  AlignedMemory again(kBytes);
  EXPECT_FALSE(read(*store_, extent_, again));
  EXPECT_TRUE(again == memory_);
}

TEST_P(SealedTest, WhatTheStoreWroteIsComparedToo) {
  ASSERT_FALSE(write(*store_, extent_, memory_));
  AlignedMemory found(kBytes);
  ASSERT_FALSE(fetch(found));
  sealed_.open(*store_, 0, kBytes);
  EXPECT_TRUE(found == memory_);
}

TEST_P(SealedTest, AFlippedBitIsNamedAndItsBlockIsNotGivenOut) {
  for (const int64_t at : {int64_t{0}, 2 * kBlock + 5, kBytes - 1}) {
    extent_ = store_->allocate(kBytes);
    fill_and_write();
    AlignedMemory found(kBytes);
    flip_at_rest(at);
    ASSERT_FALSE(fetch(found));
    const int64_t block = at / kBlock * kBlock;
    sealed_.open(*store_, 0, block);
    const Error error = error_of([&] { sealed_.open(*store_, block, kBytes); });
    EXPECT_EQ(error.kind, ErrorKind::corrupt);
    EXPECT_EQ(error.operation, Operation::read);
    EXPECT_EQ(error.path, store_->file_of(extent_));
    EXPECT_EQ(error.offset_bytes, extent_.offset + block);
    EXPECT_EQ(error.length_bytes, std::min(kBlock, kBytes - block));
    EXPECT_EQ(std::filesystem::exists(error.path), GetParam()) << error.path;
    // It stays shut, and nothing of it can be written.
    EXPECT_EQ(error_of([&] { sealed_.open(*store_, block, kBytes); }).kind, ErrorKind::corrupt);
    Transfer transfer = make_transfer(Kind::write, extent_, nullptr);
    EXPECT_THROW(sealed_.hand_over(transfer), std::logic_error);
  }
}

TEST_P(SealedTest, WhatFlippedOnTheWayIsReadAgain) {
  fill_and_write();
  AlignedMemory found(kBytes);
  ASSERT_FALSE(fetch(found));
  for (const int64_t at : {kBlock + 7, kBytes - 1}) found.data()[at] ^= std::byte{0x10};
  *sealed_.open(*store_, 0, kBlock) ^= std::byte{1};  // an update of the first block
  memory_.data()[0] ^= std::byte{1};
  sealed_.seal(0, kBlock);
  sealed_.open(*store_, kBlock, kBytes);
  EXPECT_TRUE(found == memory_) << "the bytes that are on the disk, and what was changed since";
  EXPECT_EQ(store_->stats().paths[0].retries.checksums, 2);
}

TEST_P(SealedTest, WhatChangedAfterItsSealIsFoundByTheNextRead) {
  sealed_.start(memory_.data(), kBytes);
  sealed_.open(*store_, 0, kBytes);
  sealed_.seal(0, kBytes);
  memory_.data()[kBlock] ^= std::byte{1};
  write_back();
  AlignedMemory found(kBytes);
  const auto error = read(*store_, extent_, found);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::corrupt);
  EXPECT_EQ(error->offset_bytes, extent_.offset + kBlock);
}

TEST_P(SealedTest, NothingIsSkipped) {
  fill_and_write();
  AlignedMemory found(kBytes);
  ASSERT_FALSE(fetch(found));
  Transfer transfer = make_transfer(Kind::write, extent_, nullptr);
  EXPECT_THROW(sealed_.hand_over(transfer), std::logic_error);  // not opened
  EXPECT_THROW(sealed_.seal(0, kBlock), std::logic_error);
  EXPECT_THROW(sealed_.open(*store_, kBlock, 2 * kBlock), std::logic_error);
  EXPECT_THROW(sealed_.open(*store_, 0, 100), std::logic_error);
  EXPECT_THROW(sealed_.open(*store_, 0, 2 * kBytes), std::logic_error);
  sealed_.open(*store_, 0, kBytes);
  EXPECT_THROW(sealed_.seal(kBlock, 2 * kBlock), std::logic_error);
  sealed_.seal(0, 4 * kBlock);
  EXPECT_THROW(sealed_.hand_over(transfer), std::logic_error);  // the last block is not sealed
  sealed_.seal(4 * kBlock, kBytes);
  transfer.extent.bytes = 4 * kBlock;
  EXPECT_THROW(sealed_.hand_over(transfer), std::logic_error);
  transfer.extent.bytes = kBytes;
  EXPECT_NO_THROW(sealed_.hand_over(transfer));
  EXPECT_EQ(transfer.memory, found.data());
}

TEST_P(SealedTest, RoomForTheChecksumsIsCounted) {
  fill_and_write();
  AlignedMemory found(kBytes);
  Sealed small(kBytes / 2);
  Transfer transfer = make_transfer(Kind::read, extent_, found.data());
  EXPECT_THROW(small.expect(transfer), std::logic_error);
  std::array<uint64_t, 2> sums{};
  transfer.check = Transfer::Check::by_caller;
  transfer.checksums = sums;
  store_->submit(transfer);
  store_->drain();
  ASSERT_TRUE(transfer.error);
  EXPECT_EQ(transfer.error->kind, ErrorKind::invalid);
}

TEST_P(SealedTest, AnErrorOfTheTransferComesAsBefore) {
  AlignedMemory found(kBytes);
  const auto error = fetch(found);  // never written
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::corrupt);
}

INSTANTIATE_TEST_SUITE_P(Stores, SealedTest, testing::Bool(),
                         [](const auto& one) { return one.param ? "file" : "memory"; });

}  // namespace
}  // namespace overspill::io
