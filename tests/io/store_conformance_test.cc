// What every store must do, whatever moves its bytes.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "io/checksum.h"
#include "io/memory_store.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

using Kind = Transfer::Kind;

enum class Variety {
  uring,
  threads,
  buffered_uring,
  buffered_threads,
  memory,
  faulty_memory,
  virtual_memory
};

std::string name_of(Variety variety) {
  switch (variety) {
    case Variety::uring:
      return "uring";
    case Variety::threads:
      return "threads";
    case Variety::buffered_uring:
      return "buffered_uring";
    case Variety::buffered_threads:
      return "buffered_threads";
    case Variety::memory:
      return "memory";
    case Variety::faulty_memory:
      return "faulty_memory";
    case Variety::virtual_memory:
      return "virtual_memory";
  }
  return "";
}

class StoreConformance : public testing::TestWithParam<Variety> {
 protected:
  void SetUp() override {
    try {
      open();
    } catch (const StoreError& error) {
      if (error.error().kind != ErrorKind::unsupported) throw;
      GTEST_SKIP() << error.what();
    }
    store_->reserve(16 * kMiB);
  }

  void open() {
    const Variety variety = GetParam();
    if (variety == Variety::memory || variety == Variety::faulty_memory ||
        variety == Variety::virtual_memory) {
      Faults faults;
      if (variety != Variety::memory) {
        faults = {.seed = 20, .reorder = true, .short_transfer = 0.3, .interrupted = 0.2};
        faults.delay_max = std::chrono::microseconds(50);
      }
      const bool on_one_thread = variety == Variety::virtual_memory;
      store_ = make_memory_store(64 * kMiB, faults, 128 << 10,
                                 on_one_thread ? std::make_shared<VirtualTime>() : nullptr);
      return;
    }
    FileStoreOptions options = file_options(folder_.path());
    const bool uring = variety == Variety::uring || variety == Variety::buffered_uring;
    options.backend = uring ? FileStoreOptions::Backend::uring : FileStoreOptions::Backend::threads;
    options.direct = variety == Variety::uring || variety == Variety::threads;
    store_ = make_file_store(options);
  }

  Extent written(int64_t bytes, uint64_t seed) {
    const Extent extent = store_->allocate(bytes);
    AlignedMemory memory(extent.bytes);
    memory.fill(seed);
    EXPECT_FALSE(write(*store_, extent, memory));
    return extent;
  }
  void expect_content(const Extent& extent, uint64_t seed) {
    AlignedMemory expected(extent.bytes);
    expected.fill(seed);
    AlignedMemory found(extent.bytes);
    const auto error = read(*store_, extent, found);
    ASSERT_FALSE(error) << error->message();
    EXPECT_TRUE(found == expected);
  }

  ScratchFolder folder_;
  std::unique_ptr<Store> store_;
};

TEST_P(StoreConformance, RoundTripsOfManySizes) {
  std::vector<std::pair<Extent, uint64_t>> extents;
  uint64_t seed = 0;
  for (const int64_t bytes : {int64_t{1}, kBlockBytes, kBlockBytes + 1, 60 * kBlockBytes / 4, 64 * 1024L,
                              65 * 1024L, 128 * 1024L, 132 * 1024L, kMiB, kMiB + kBlockBytes, 3 * kMiB}) {
    extents.emplace_back(written(bytes, ++seed), seed);
    EXPECT_EQ(extents.back().first.bytes, round_up_to_block(bytes));
  }
  for (const auto& [extent, number] : extents) expect_content(extent, number);
  const StoreStats stats = store_->stats();
  int64_t total = 0;
  for (const auto& [extent, number] : extents) total += extent.bytes;
  EXPECT_EQ(stats.bytes_written, total);
  EXPECT_EQ(stats.bytes_read, total);
  EXPECT_EQ(stats.transfers, static_cast<int64_t>(2 * extents.size()));
  EXPECT_EQ(stats.allocated_bytes, total);
  EXPECT_GE(stats.reserved_bytes, 16 * kMiB);
}

TEST_P(StoreConformance, ManyInFlight) {
  constexpr int kCount = 100;
  constexpr int64_t kBytes = 152 * 1024 / kBlockBytes * kBlockBytes;
  std::deque<AlignedMemory> memory;
  std::vector<Extent> extents;
  std::deque<Transfer> transfers;
  for (int i = 0; i < kCount; ++i) {
    memory.emplace_back(kBytes).fill(static_cast<uint64_t>(i));
    extents.push_back(store_->allocate(kBytes));
    transfers.push_back(make_transfer(Kind::write, extents.back(), memory.back().data()));
  }
  for (Transfer& transfer : transfers) store_->submit(transfer);
  store_->drain();
  for (const Transfer& transfer : transfers) ASSERT_FALSE(transfer.error) << transfer.error->message();
  transfers.clear();
  for (int i = 0; i < kCount; ++i) {
    std::ranges::fill(memory[static_cast<size_t>(i)].all(), std::byte{0});
    transfers.push_back(
        make_transfer(Kind::read, extents[static_cast<size_t>(i)], memory[static_cast<size_t>(i)].data()));
    transfers.back().priority = static_cast<Transfer::Priority>(i % 3);
    store_->submit(transfers.back());
  }
  store_->drain();
  AlignedMemory expected(kBytes);
  for (int i = 0; i < kCount; ++i) {
    const auto index = static_cast<size_t>(i);
    ASSERT_FALSE(transfers[index].error) << transfers[index].error->message();
    expected.fill(static_cast<uint64_t>(i));
    ASSERT_TRUE(memory[index] == expected) << i;
  }
  EXPECT_GT(store_->stats().in_flight_max, 1);
}

TEST_P(StoreConformance, UnwrittenReadIsCorrupt) {
  const Extent extent = store_->allocate(kMiB);
  AlignedMemory memory(extent.bytes);
  const auto error = read(*store_, extent, memory);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::corrupt);
  EXPECT_EQ(store_->stats().bytes_read, 0);
}

TEST_P(StoreConformance, InvalidTransfersAreRefused) {
  Extent extent = written(kMiB, 1);
  AlignedMemory memory(2 * kMiB);
  const auto kind_of = [&](const Extent& one, std::byte* at, Kind kind) {
    const auto error = run(*store_, kind, one, at);
    return error ? std::optional(error->kind) : std::nullopt;
  };
  EXPECT_EQ(kind_of(extent, memory.data() + 512, Kind::read), ErrorKind::invalid);
  EXPECT_EQ(kind_of(extent, nullptr, Kind::read), ErrorKind::invalid);
  EXPECT_EQ(kind_of({}, memory.data(), Kind::read), ErrorKind::invalid);
  EXPECT_EQ(kind_of(extent, memory.data(), Kind::write), ErrorKind::invalid) << "written once";
  for (Extent wrong : {extent, extent, extent, extent}) {
    static int which = 0;
    switch (which++ % 4) {
      case 0:
        wrong.bytes += kBlockBytes;
        break;
      case 1:
        wrong.generation += 1;
        break;
      case 2:
        wrong.slab += 1000;
        break;
      default:
        wrong.offset += kBlockBytes;
        break;
    }
    EXPECT_EQ(kind_of(wrong, memory.data(), Kind::read), ErrorKind::invalid);
  }
  store_->release(extent);
  EXPECT_EQ(kind_of(extent, memory.data(), Kind::read), ErrorKind::invalid);
  EXPECT_EQ(error_of([&] { store_->allocate(0); }).kind, ErrorKind::invalid);
  EXPECT_EQ(error_of([&] { store_->allocate(-1); }).kind, ErrorKind::invalid);
  EXPECT_EQ(error_of([&] { store_->reserve(-1); }).kind, ErrorKind::invalid);
}

TEST_P(StoreConformance, DoubleReleaseAndUnpinAreInvalid) {
  const Extent extent = written(kMiB, 1);
  EXPECT_EQ(error_of([&] { store_->unpin(extent); }).kind, ErrorKind::invalid);
  store_->release(extent);
  EXPECT_EQ(error_of([&] { store_->release(extent); }).kind, ErrorKind::invalid);
  EXPECT_EQ(error_of([&] { store_->pin(extent); }).kind, ErrorKind::invalid);
  const Extent again = store_->allocate(kMiB);  // the same bytes, or not: never the same extent
  EXPECT_FALSE(again == extent);
  EXPECT_EQ(error_of([&] { store_->release(extent); }).kind, ErrorKind::invalid);
}

TEST_P(StoreConformance, ReleasedBytesComeBack) {
  for (int round = 0; round < 20; ++round) {
    std::vector<Extent> extents;
    for (int i = 0; i < 8; ++i) extents.push_back(store_->allocate(round % 2 == 0 ? kMiB : 2 * kMiB));
    for (const Extent& extent : extents) store_->release(extent);
    ASSERT_EQ(store_->stats().allocated_bytes, 0);
  }
  EXPECT_LE(store_->stats().reserved_bytes, 16 * kMiB) << "coalesced runs need no further slabs";
}

TEST_P(StoreConformance, NothingFreeIsNoSpace) {
  const Extent all[] = {store_->allocate(4 * kMiB), store_->allocate(4 * kMiB), store_->allocate(4 * kMiB),
                        store_->allocate(4 * kMiB)};
  const Error error = error_of([&] { store_->allocate(kBlockBytes); });
  EXPECT_EQ(error.kind, ErrorKind::no_space);
  EXPECT_FALSE(error.path.empty());
  EXPECT_TRUE(contains(error.message(), "4096")) << error.message();
  store_->release(all[1]);
  EXPECT_EQ(store_->allocate(4 * kMiB).bytes, 4 * kMiB);
}

TEST_P(StoreConformance, ReservationHoldsDespiteFragments) {
  // 3 MiB extents leave 1 MiB of each 4 MiB slab; 16 MiB were promised.
  for (int i = 0; i < 5; ++i) EXPECT_EQ(store_->allocate(3 * kMiB).bytes, 3 * kMiB);
  EXPECT_EQ(error_of([&] { store_->allocate(3 * kMiB); }).kind, ErrorKind::no_space);
}

TEST_P(StoreConformance, PinnedBytesOutliveTheirRelease) {
  const Extent pinned = written(4 * kMiB, 7);
  store_->pin(pinned);
  store_->pin(pinned);
  store_->release(pinned);
  EXPECT_EQ(store_->stats().allocated_bytes, 4 * kMiB);
  std::vector<Extent> others;
  for (int i = 0; i < 3; ++i) others.push_back(written(4 * kMiB, 100 + static_cast<uint64_t>(i)));
  EXPECT_EQ(error_of([&] { store_->allocate(4 * kMiB); }).kind, ErrorKind::no_space);
  store_->unpin(pinned);
  expect_content(pinned, 7);
  store_->unpin(pinned);
  EXPECT_EQ(store_->stats().allocated_bytes, 12 * kMiB);
  EXPECT_EQ(store_->allocate(4 * kMiB).bytes, 4 * kMiB);
}

TEST_P(StoreConformance, ReleaseInFlightDoesNotReuseTheBytes) {
  // Reads of a version that is released meanwhile must return it, whatever is written next.
  for (uint64_t round = 0; round < 20; ++round) {
    const Extent old = written(2 * kMiB, round);
    AlignedMemory read_back(old.bytes);
    Transfer reading = make_transfer(Kind::read, old, read_back.data());
    store_->submit(reading);
    store_->release(old);
    const Extent next = store_->allocate(2 * kMiB);
    AlignedMemory other(next.bytes);
    other.fill(1000 + round);
    Transfer writing = make_transfer(Kind::write, next, other.data());
    writing.priority = Transfer::Priority::demand;
    store_->submit(writing);
    store_->drain();
    ASSERT_FALSE(reading.error) << reading.error->message();
    ASSERT_FALSE(writing.error);
    AlignedMemory expected(old.bytes);
    expected.fill(round);
    ASSERT_TRUE(read_back == expected);
    store_->release(next);
  }
}

struct Chain {
  Store& store;
  AlignedMemory memory{kMiB};
  int rounds = 0;
  std::atomic<bool> failed = false;
  std::atomic<bool> over = false;
};

// Alternates: the write's completion submits a read, the read's allocates anew, releases the old and writes
// again.
void next_in_chain(Transfer& transfer) noexcept {
  Chain& chain = *static_cast<Chain*>(transfer.context);
  if (transfer.error) chain.failed = true;
  if (transfer.error || (transfer.kind == Kind::read && ++chain.rounds == 20)) {
    chain.over = true;
    return;
  }
  if (transfer.kind == Kind::read) {
    const Extent old = transfer.extent;
    transfer.extent = chain.store.allocate(kMiB);
    chain.store.release(old);
    chain.memory.fill(static_cast<uint64_t>(chain.rounds));
  }
  transfer.kind = transfer.kind == Kind::read ? Kind::write : Kind::read;
  chain.store.submit(transfer);
}

TEST_P(StoreConformance, CompletionsMaySubmitAllocateAndRelease) {
  Chain chain{*store_};
  Transfer transfer = make_transfer(Kind::write, store_->allocate(kMiB), chain.memory.data());
  transfer.on_complete = next_in_chain;
  transfer.context = &chain;
  store_->submit(transfer);
  while (!chain.over) store_->drain();  // a drain waits only for what was submitted before it
  store_->drain();
  EXPECT_FALSE(chain.failed);
  EXPECT_EQ(chain.rounds, 20);
}

TEST_P(StoreConformance, ExportedBytesStandInTheFolder) {
  const Extent a = written(3 * kMiB, 1);
  const Extent b = written(100 * 1024, 2);
  const Extent extents[] = {b, a};
  for (const Extent& extent : extents) store_->pin(extent);
  const auto checkpoint = folder_.path() / "checkpoint";
  std::filesystem::create_directory(checkpoint);
  const auto exported = store_->export_extents(extents, checkpoint).extents;
  ASSERT_EQ(exported.size(), 2U);
  store_.reset();  // the folder owns its bytes
  for (size_t i = 0; i < 2; ++i) {
    AlignedMemory expected(extents[i].bytes);
    expected.fill(i == 0 ? 2 : 1);
    EXPECT_EQ(exported[i].bytes, extents[i].bytes);
    EXPECT_EQ(exported[i].block_checksums, block_checksums(expected.all()));
    std::vector<char> found(static_cast<size_t>(exported[i].bytes));
    std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen((checkpoint / exported[i].file).c_str(), "rb"),
                                               &std::fclose);
    ASSERT_NE(file, nullptr);
    ASSERT_EQ(std::fseek(file.get(), exported[i].offset, SEEK_SET), 0);
    ASSERT_EQ(std::fread(found.data(), 1, found.size(), file.get()), found.size());
    EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size()), 0);
  }
}

TEST_P(StoreConformance, ExportOfUnwrittenBytesFails) {
  const Extent extents[] = {written(kMiB, 1), store_->allocate(kMiB)};
  const auto checkpoint = folder_.path() / "checkpoint";
  std::filesystem::create_directory(checkpoint);
  EXPECT_EQ(error_of([&] { store_->export_extents(extents, checkpoint); }).kind, ErrorKind::corrupt);
  EXPECT_TRUE(std::filesystem::is_empty(checkpoint));
  store_->release(extents[0]);
  store_->release(extents[1]);
  EXPECT_EQ(store_->stats().allocated_bytes, 0) << "the failed export holds nothing";
}

TEST_P(StoreConformance, SoakAgainstAModel) {
  const uint64_t seed = 12345;
  RecordProperty("seed", std::to_string(seed));
  std::mt19937_64 random(seed);
  struct Known {
    Extent extent;
    uint64_t seed;
    int pins = 0;
    bool released = false;
  };
  std::deque<AlignedMemory> buffers;
  for (int i = 0; i < 8; ++i) buffers.emplace_back(kMiB / 2);
  std::vector<Known> model;
  uint64_t version = 0;
  for (int step = 0; step < 60; ++step) {
    std::vector<size_t> reads;
    std::deque<Transfer> transfers;
    std::vector<Known> fresh;
    for (AlignedMemory& buffer : buffers) {
      const bool writes = model.empty() || random() % 2 == 0;
      if (writes) {
        const int64_t bytes = static_cast<int64_t>(random() % (512 * 1024)) + 1;
        fresh.push_back({store_->allocate(bytes), ++version});
        buffer.fill(version);
        transfers.push_back(make_transfer(Kind::write, fresh.back().extent, buffer.data()));
        reads.push_back(SIZE_MAX);
      } else {
        reads.push_back(random() % model.size());
        transfers.push_back(make_transfer(Kind::read, model[reads.back()].extent, buffer.data()));
      }
      transfers.back().priority = static_cast<Transfer::Priority>(random() % 3);
      store_->submit(transfers.back());
    }
    store_->drain();
    AlignedMemory expected(kMiB / 2);
    for (size_t slot = 0; slot < buffers.size(); ++slot) {
      ASSERT_FALSE(transfers[slot].error) << transfers[slot].error->message();
      if (reads[slot] == SIZE_MAX) continue;
      const Known& known = model[reads[slot]];
      expected.fill(known.seed);
      ASSERT_EQ(std::memcmp(expected.data(), buffers[slot].data(), static_cast<size_t>(known.extent.bytes)),
                0)
          << "step " << step;
    }
    model.insert(model.end(), fresh.begin(), fresh.end());
    for (Known& known : model) {
      const uint64_t dice = random() % 8;
      if (dice == 0 && known.pins < 2) store_->pin(known.extent), ++known.pins;
      if (dice == 1 && known.pins > 0) store_->unpin(known.extent), --known.pins;
      if (dice <= 3 && !known.released) store_->release(known.extent), known.released = true;
    }
    std::erase_if(model, [](const Known& known) { return known.released && known.pins == 0; });
    int64_t allocated = 0;
    for (const Known& known : model) allocated += known.extent.bytes;
    ASSERT_EQ(store_->stats().allocated_bytes, allocated);
  }
}

INSTANTIATE_TEST_SUITE_P(All, StoreConformance,
                         testing::Values(Variety::uring, Variety::threads, Variety::buffered_uring,
                                         Variety::buffered_threads, Variety::memory, Variety::faulty_memory,
                                         Variety::virtual_memory),
                         [](const auto& param) { return name_of(param.param); });

}  // namespace
}  // namespace overspill::io
