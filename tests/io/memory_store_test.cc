// The simulated store: its faults happen, are counted, and repeat with the seed.
#include "io/memory_store.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <chrono>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "io/checksum.h"
#include "io/slab_space.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

std::shared_ptr<VirtualTime> virtual_time() {
  return std::make_shared<VirtualTime>();
}

TEST(MemoryStore, ErrorsAreInjectedPerOperation) {
  const auto store = make_memory_store(8 * kMiB, {.seed = 1, .write_error = 1, .write_errno = ENOSPC});
  store->reserve(8 * kMiB);
  AlignedMemory memory(kMiB);
  const auto error = write(*store, store->allocate(kMiB), memory);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::no_space);
  EXPECT_EQ(store->fault_counts().write_errors, 1);
  EXPECT_EQ(store->seed(), 1U);

  const auto reads = make_memory_store(8 * kMiB, {.seed = 1, .read_error = 1});
  reads->reserve(8 * kMiB);
  EXPECT_EQ(read(*reads, written(*reads, kMiB, 1), memory)->kind, ErrorKind::device);
}

TEST(MemoryStore, FlippedBitsAreCaughtWhereverTheyAre) {
  const auto store = make_memory_store(8 * kMiB, {}, kPiece);
  store->reserve(8 * kMiB);
  const Extent extent = written(*store, 300 * 1024, 1);
  AlignedMemory memory(extent.bytes);
  for (int64_t bit = 3; bit < extent.bytes * 8; bit += 99 * 1024 * 8 + 11) {
    store->flip_bit(extent, bit);
    const auto error = read(*store, extent, memory);
    ASSERT_TRUE(error) << bit;
    EXPECT_EQ(error->kind, ErrorKind::corrupt);
    EXPECT_EQ(error->offset_bytes, extent.offset + bit / 8 / kChecksumBlockBytes * kChecksumBlockBytes);
    store->flip_bit(extent, bit);
  }
  EXPECT_FALSE(read(*store, extent, memory));
}

TEST(MemoryStore, NoInjectedFlipGoesUnnoticed) {
  Faults faults{.seed = 4, .short_transfer = 0.5, .bit_flip_on_read = 0.2};
  const auto store = make_memory_store(8 * kMiB, faults, kPiece);
  store->reserve(8 * kMiB);
  const Extent extent = written(*store, kMiB, 9);
  AlignedMemory expected(kMiB);
  expected.fill(9);
  int failed = 0;
  for (int i = 0; i < 50; ++i) {
    AlignedMemory found(kMiB);
    const int64_t flips = store->fault_counts().bit_flips;
    const auto error = read(*store, extent, found);
    EXPECT_TRUE(store->fault_counts().bit_flips > flips || !error);
    EXPECT_TRUE(error || found == expected);
    failed += error.has_value();
  }
  EXPECT_GT(failed, 0) << "what is flipped twice in a row";
  EXPECT_LT(failed, 50) << "what is flipped once is read again";
  EXPECT_GT(store->stats().paths[0].retries.checksums, failed);
  EXPECT_LT(store->stats().bytes_read, 50 * kMiB);
}

TEST(MemoryStore, FaultsRepeatWithTheSeed) {
  const auto counts_of = [](uint64_t seed) {
    Faults faults{.seed = seed, .short_transfer = 0.3, .interrupted = 0.2, .bit_flip_on_read = 0.1};
    const auto store = make_memory_store(8 * kMiB, faults, kPiece);
    store->reserve(8 * kMiB);
    const Extent extent = written(*store, kMiB, 9);
    AlignedMemory memory(kMiB);
    for (int i = 0; i < 10; ++i) read(*store, extent, memory);
    const FaultCounts counts = store->fault_counts();
    return std::vector{counts.short_transfers, counts.interrupted, counts.bit_flips};
  };
  EXPECT_EQ(counts_of(7), counts_of(7));
  EXPECT_NE(counts_of(7), counts_of(8));
}

TEST(MemoryStore, ReorderAndDelayHappen) {
  Faults faults{.seed = 2, .reorder = true};
  faults.delay_min = std::chrono::microseconds(10);
  faults.delay_max = std::chrono::microseconds(100);
  const auto store = make_memory_store(8 * kMiB, faults, kPiece);
  store->reserve(8 * kMiB);
  AlignedMemory memory(kPiece);
  std::deque<Transfer> transfers;
  std::vector<int> order;
  std::pair<std::vector<int>*, int> entries[32];
  for (int i = 0; i < 32; ++i) {
    entries[i] = {&order, i};
    transfers.push_back(make_transfer(Transfer::Kind::write, store->allocate(kPiece), memory.data()));
    transfers.back().context = &entries[i];
    transfers.back().on_complete = [](Transfer& transfer) noexcept {
      const auto& entry = *static_cast<std::pair<std::vector<int>*, int>*>(transfer.context);
      entry.first->push_back(entry.second);
    };
    store->submit(transfers.back());
  }
  store->drain();
  EXPECT_EQ(order.size(), 32U);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  EXPECT_GT(store->fault_counts().reordered, 0);
  EXPECT_EQ(store->fault_counts().delayed, 32);
}

TEST(MemoryStore, ACutDropsWhatWasNotExported) {
  const ScratchFolder folder;
  const auto store = make_memory_store(8 * kMiB);
  store->reserve(8 * kMiB);
  const Extent kept = written(*store, kMiB, 1);
  const auto exported = store->export_extents(std::span(&kept, 1), folder.path()).extents;
  const Extent lost = written(*store, kMiB, 2);
  store->cut();
  AlignedMemory memory(kMiB);
  EXPECT_FALSE(read(*store, kept, memory));
  EXPECT_EQ(read(*store, lost, memory)->kind, ErrorKind::corrupt);
  EXPECT_EQ(store->fault_counts().dropped, 1);
}

TEST(MemoryStore, ATornWriteIsCaught) {
  const auto store = make_memory_store(8 * kMiB, {.dropped_at_cut = 0, .torn_at_cut = 1});
  store->reserve(8 * kMiB);
  const Extent torn = written(*store, 8192, 2);
  store->cut();
  AlignedMemory memory(8192);
  EXPECT_EQ(read(*store, torn, memory)->kind, ErrorKind::corrupt);
  EXPECT_EQ(store->fault_counts().torn, 1);
}

// ---- what a disk does without saying so: the next read of every place concerned is refused

/// Writes `extents` extents of one block each, some of which the store spoils; how many read as corrupt. What
/// does not is what was written.
int spoiled(MemoryStore& store, int extents) {
  store.reserve(8 * kMiB);
  std::vector<Extent> all;
  for (int i = 0; i < extents; ++i) all.push_back(written(store, kBlockBytes, 100 + i));
  int corrupt = 0;
  AlignedMemory found(kBlockBytes);
  AlignedMemory expected(kBlockBytes);
  for (int i = 0; i < extents; ++i) {
    expected.fill(100 + i);
    const auto error = read(store, all[i], found);
    EXPECT_TRUE(error || found == expected) << i;
    if (!error) continue;
    EXPECT_EQ(error->kind, ErrorKind::corrupt);
    EXPECT_EQ(error->offset_bytes, all[i].offset);
    EXPECT_EQ(error->path, "memory");
    ++corrupt;
  }
  return corrupt;
}

TEST(MemoryStore, ALostWriteIsCaught) {
  const auto store = make_memory_store(8 * kMiB, {.seed = 3, .lost_write = 0.2}, kPiece, virtual_time());
  const int corrupt = spoiled(*store, 64);
  EXPECT_EQ(corrupt, store->fault_counts().lost_writes);
  EXPECT_GT(store->fault_counts().lost_writes, 0);
}

TEST(MemoryStore, AMisdirectedWriteIsCaughtInBothPlaces) {
  const auto store = make_memory_store(8 * kMiB, {.misdirected_write = 1}, kPiece, virtual_time());
  store->reserve(8 * kMiB);
  AlignedMemory memory(2 * kBlockBytes);
  const Extent own = store->allocate(kBlockBytes);
  EXPECT_FALSE(write(*store, own, memory)) << "the disk says that it is done";
  EXPECT_EQ(read(*store, own, memory)->kind, ErrorKind::corrupt);

  const auto some =
      make_memory_store(8 * kMiB, {.seed = 3, .misdirected_write = 0.05}, kPiece, virtual_time());
  const int corrupt = spoiled(*some, 200);
  const int64_t misdirected = some->fault_counts().misdirected_writes;
  EXPECT_GT(corrupt, misdirected) << "their own places, and those that they hit";
  EXPECT_LE(corrupt, 2 * misdirected);
}

TEST(MemoryStore, AMisdirectedReadIsCaught) {
  const auto store =
      make_memory_store(8 * kMiB, {.seed = 3, .misdirected_read = 0.2}, kPiece, virtual_time());
  const int corrupt = spoiled(*store, 64);
  EXPECT_EQ(corrupt + store->stats().paths[0].retries.checksums, store->fault_counts().misdirected_reads)
      << "read a second time; refused where that is misdirected too";
  EXPECT_GT(corrupt, 0);
}

TEST(MemoryStore, ABitFlippedAtRestIsCaught) {
  const auto store =
      make_memory_store(8 * kMiB, {.seed = 3, .bit_flip_at_rest = 0.2}, kPiece, virtual_time());
  const int corrupt = spoiled(*store, 64);
  EXPECT_EQ(corrupt, store->fault_counts().bit_flips_at_rest);
  EXPECT_GT(store->fault_counts().bit_flips_at_rest, 0);
}

TEST(MemoryStore, EveryErrnoComesBackTyped) {
  const std::pair<int, ErrorKind> expected[] = {
      {EIO, ErrorKind::device},      {ENOSPC, ErrorKind::no_space},    {EDQUOT, ErrorKind::quota},
      {EFBIG, ErrorKind::quota},     {EROFS, ErrorKind::denied},       {EACCES, ErrorKind::denied},
      {ENODEV, ErrorKind::vanished}, {ENXIO, ErrorKind::vanished},     {ESTALE, ErrorKind::vanished},
      {EINVAL, ErrorKind::invalid},  {ECANCELED, ErrorKind::cancelled}};
  for (const auto& [os_error, kind] : expected) {
    const auto store =
        make_memory_store(8 * kMiB, {.write_error = 1, .write_errno = os_error}, kPiece, virtual_time());
    store->reserve(8 * kMiB);
    AlignedMemory memory(kBlockBytes);
    const Extent extent = store->allocate(kBlockBytes);
    const auto error = write(*store, extent, memory);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind, kind) << os_error;
    EXPECT_EQ(error->os_error, os_error);
    EXPECT_EQ(error->operation, Operation::write);
    EXPECT_EQ(error->length_bytes, kBlockBytes);
  }
}

// ---- virtual time

TEST(VirtualTime, RunsEventsInOrderOfTimeThenOfMaking) {
  VirtualTime time;
  std::vector<std::pair<int, int64_t>> ran;
  const auto note = [&](int event) { return [&, event] { ran.emplace_back(event, time.now_us()); }; };
  time.after(20, note(1));
  time.after(10, note(2));
  time.after(10, [&] {
    note(3)();
    time.after(10, note(4));  // as late as the first, made later
  });
  for (int i = 0; i < 4; ++i) time.advance();
  EXPECT_EQ(ran, (std::vector<std::pair<int, int64_t>>{{2, 10}, {3, 10}, {1, 20}, {4, 20}}));
  EXPECT_THROW(time.advance(), Stalled);
}

TEST(VirtualTime, IsAFunctionOfTheSeed) {
  const auto answers_of = [](uint64_t seed) {
    Faults faults{.seed = seed, .reorder = true, .short_transfer = 0.3, .interrupted = 0.2};
    faults.delay_max = std::chrono::hours(24);  // nobody sleeps
    const auto store = make_memory_store(8 * kMiB, faults, kPiece, virtual_time());
    store->reserve(8 * kMiB);
    AlignedMemory memory(kMiB);
    std::deque<Transfer> transfers;
    for (int i = 0; i < 20; ++i) {
      transfers.push_back(make_transfer(Transfer::Kind::write, store->allocate(200 * 1024), memory.data()));
      store->submit(transfers.back());
    }
    store->drain();
    std::vector<std::pair<int64_t, int64_t>> out;
    for (const Answer& answer : store->answers())
      out.emplace_back(answer.offset, answer.time_us + answer.result);
    EXPECT_EQ(store->stats().transfers, 20);
    EXPECT_GT(store->fault_counts().reordered, 0);
    return out;
  };
  EXPECT_EQ(answers_of(7), answers_of(7));
  EXPECT_NE(answers_of(7), answers_of(8));
}

TEST(VirtualTime, WaitingForNothingIsAnError) {
  const auto store = make_memory_store(8 * kMiB, {}, kPiece, virtual_time());
  store->drain();
  EXPECT_THROW(store->poll(), Stalled);
  EXPECT_FALSE(make_memory_store(8 * kMiB)->poll()) << "this one delivers by itself";
}

TEST(MemoryStore, CapacityIsTheDisk) {
  const auto store = make_memory_store(8 * kMiB);
  EXPECT_EQ(error_of([&] { store->reserve(9 * kMiB); }).kind, ErrorKind::no_space);
  EXPECT_EQ(error_of([&] { store->allocate(kMiB); }).kind, ErrorKind::no_space) << "nothing was reserved";
}

TEST(Errors, EveryKindHasAMessageWithAWayOut) {
  for (int kind = 0; kind <= static_cast<int>(ErrorKind::cancelled); ++kind) {
    const Error error{.kind = static_cast<ErrorKind>(kind),
                      .operation = Operation::write,
                      .os_error = EIO,
                      .path = "/mnt/a",
                      .offset_bytes = 4096,
                      .length_bytes = 8192,
                      .detail = "why"};
    const std::string message = error.message();
    for (const char* part : {"write failed", "/mnt/a", "4096", "8192", "errno 5", "why", "; "}) {
      EXPECT_TRUE(contains(message, part)) << message;
    }
    EXPECT_FALSE(contains(message, "unknown")) << message;
  }
  for (int os_error = 1; os_error < 140; ++os_error) kind_of_errno(os_error);
  EXPECT_EQ(kind_of_errno(ENOSPC), ErrorKind::no_space);
  EXPECT_EQ(kind_of_errno(EFBIG), ErrorKind::quota);
  EXPECT_EQ(kind_of_errno(EIO), ErrorKind::device);
}

TEST(Checksum, BlocksOf64KiBAndATail) {
  AlignedMemory memory(132 * 1024);
  memory.fill(1);
  const auto sums = block_checksums(memory.all());
  ASSERT_EQ(sums.size(), 3U);
  EXPECT_EQ(sums[2], checksum_block(memory.all().subspan(128 * 1024)));
  EXPECT_TRUE(block_checksums({}).empty());
  EXPECT_EQ(checksum_block({}), 0x2d06800538d394c2U) << "XXH3-64 of nothing, by its specification";
}

TEST(Checksum, EveryInstructionSetGivesWhatTheLibraryDoes) {
  AlignedMemory memory(132 * 1024);
  memory.fill(3);
  int cases = 0;
  for (const ChecksumForm& form : checksum_forms()) {
    for (size_t bytes = 0; bytes <= 3 * 1024; ++bytes, ++cases) {
      const auto* data = memory.all().data() + bytes % 64;
      ASSERT_EQ(form.hash(data, bytes), XXH3_64bits(data, bytes)) << form.name << ", " << bytes << " bytes";
    }
    for (const size_t bytes : {65535, 65536, 65537, 131072}) {
      ASSERT_EQ(form.hash(memory.all().data(), bytes), XXH3_64bits(memory.all().data(), bytes)) << form.name;
    }
    std::cout << form.name << ' ';
  }
  std::cout << cases << " cases\n";
  EXPECT_EQ(checksum_block(memory.all()), XXH3_64bits(memory.all().data(), memory.all().size()));
}

TEST(SlabSpace, CoalescesFromBothSides) {
  SlabSpace space;
  space.add_slab(0, 4 * kBlockBytes);
  space.raise_limit(4 * kBlockBytes);
  const int orders[][4] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 1, 3}, {1, 3, 0, 2}};
  for (const auto& order : orders) {
    Extent extents[4];
    for (Extent& extent : extents) extent = space.allocate(kBlockBytes);
    EXPECT_TRUE(space.allocate(kBlockBytes).empty());
    for (const int index : order) space.release(extents[index]);
    const Extent all = space.allocate(4 * kBlockBytes);
    EXPECT_EQ(all.bytes, 4 * kBlockBytes);
    space.release(all);
  }
}

}  // namespace
}  // namespace overspill::io
