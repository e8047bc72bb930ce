// The stash of activations made alone, in virtual time: what leaves the arena, what is read ahead, and what
// is refused. With an engine and real autograd: tests/python/test_activations.py.
#include "engine/activations/activation_stash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "engine/base/engine_failed.h"
#include "io/error.h"
#include "io/memory_store.h"
#include "tests/engine/around_store.h"
#include "tests/engine/parts.h"

namespace overspill::testing {
namespace {

using engine::ActivationStash;

constexpr int64_t kBlock = io::kBlockBytes;
constexpr int64_t kArena = 8 * kBlock;

class Stash : public ::testing::Test {
 protected:
  Stash() : stash_(owners_->setup, owners_->core, owners_->hardware) {}
  ~Stash() override {
    owners_->core.store->drain();  // from and into the arena
  }

  static std::unique_ptr<Owners> make(const io::Faults& faults = {}) {
    return make_owners(
        {.faults = faults, .change_plan = [](engine::Plan& plan) { plan.activations_host_bytes = kArena; }});
  }

  static std::vector<std::byte> content(int64_t bytes, int seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::vector<std::byte> made(static_cast<size_t>(bytes));
    for (std::byte& value : made) value = static_cast<std::byte>(random());
    return made;
  }

  std::optional<int64_t> try_put(const std::vector<std::byte>& bytes) {
    const MutexLock lock(owners_->core.mutex());
    return stash_.put(bytes);
  }
  int64_t put(const std::vector<std::byte>& bytes) {
    const std::optional<int64_t> number = try_put(bytes);
    if (!number) throw std::runtime_error("no room");
    return *number;
  }
  void drop(int64_t number) {
    const MutexLock lock(owners_->core.mutex());
    stash_.drop(number);
  }
  bool holds(int64_t number, const std::vector<std::byte>& wanted) {
    std::vector<std::byte> found(wanted.size());
    const MutexLock lock(owners_->core.mutex());
    stash_.take(number, found);
    return found == wanted;
  }
  engine::ActivationStats stats() {
    const MutexLock lock(owners_->core.mutex());
    return stash_.stats();
  }
  int64_t allocated() { return owners_->core.store->stats().allocated_bytes; }

  std::unique_ptr<Owners> owners_ = make();
  ActivationStash stash_;
};

TEST_F(Stash, GivesBackTheBytesOfForwardInTheOrderOfBackward) {
  // Four times what the arena holds, none a multiple of a block.
  std::vector<std::vector<std::byte>> contents;
  std::vector<int64_t> numbers;
  for (int i = 0; i < 32; ++i) {
    contents.push_back(content(kBlock - 7 * i - 1, i));
    numbers.push_back(put(contents.back()));
  }
  let_transfers_end(*owners_);
  EXPECT_GT(stats().written_bytes, 23 * kBlock);
  for (int i = 31; i >= 0; --i) {
    EXPECT_TRUE(holds(numbers[i], contents[i])) << i;
    drop(numbers[i]);
    let_transfers_end(*owners_);
  }
  EXPECT_EQ(allocated(), 0) << "an extent was leaked";
}

TEST_F(Stash, WhatFitsIsNeverWritten) {
  std::vector<int64_t> numbers;
  for (int i = 0; i < 6; ++i) numbers.push_back(put(content(kBlock, i)));  // a quarter is kept free
  let_transfers_end(*owners_);
  EXPECT_EQ(stats().written_bytes, 0);
  for (int i = 5; i >= 0; --i) EXPECT_TRUE(holds(numbers[i], content(kBlock, i)));
  EXPECT_EQ(stats().read_bytes, 0);
}

TEST_F(Stash, TheOldestLeavesFirst) {
  std::vector<int64_t> numbers;
  for (int i = 0; i < 12; ++i) numbers.push_back(put(content(kBlock, i)));
  let_transfers_end(*owners_);
  const int64_t written = stats().written_bytes;
  EXPECT_GE(written, 6 * kBlock);
  EXPECT_LT(written, 8 * kBlock);
  // The newest are still there.
  for (int i = 11; i > 7; --i) EXPECT_TRUE(holds(numbers[i], content(kBlock, i)));
  EXPECT_EQ(stats().demand_reads, 0);
}

TEST_F(Stash, ReadsAheadInBackward) {
  std::vector<int64_t> numbers;
  for (int i = 0; i < 24; ++i) numbers.push_back(put(content(kBlock, i)));
  let_transfers_end(*owners_);
  for (int i = 23; i >= 0; --i) {
    EXPECT_TRUE(holds(numbers[i], content(kBlock, i))) << i;
    drop(numbers[i]);
    let_transfers_end(*owners_);
  }
  EXPECT_GT(stats().read_bytes, 15 * kBlock);
  EXPECT_EQ(stats().demand_reads, 0) << "all but the newest were there before they were asked for";
}

TEST_F(Stash, AnyOtherOrderCostsTimeAlone) {
  std::vector<int64_t> numbers;
  for (int i = 0; i < 24; ++i) numbers.push_back(put(content(kBlock, i)));
  std::mt19937 random(1);
  std::vector<int> order(24);
  for (int i = 0; i < 24; ++i) order[static_cast<size_t>(i)] = i;
  std::ranges::shuffle(order, random);
  for (const int twice : {0, 1}) {
    for (const int i : order) EXPECT_TRUE(holds(numbers[static_cast<size_t>(i)], content(kBlock, i))) << i;
    if (twice == 1) break;
    EXPECT_TRUE(holds(put(content(kBlock, 99)), content(kBlock, 99)));  // forward again, in the middle
  }
  for (const int64_t number : numbers) drop(number);
  drop(numbers.back() + 1);
  let_transfers_end(*owners_);
  EXPECT_EQ(allocated(), 0);
}

TEST_F(Stash, WhatIsLargerThanTheArenaIsLeftToTheCaller) {
  EXPECT_FALSE(try_put(content(kArena + 1, 0)));
  EXPECT_TRUE(try_put(content(kArena, 0)));
}

TEST_F(Stash, OneThatFillsTheArenaDrivesAllOthersOut) {
  std::vector<int64_t> numbers;
  for (int i = 0; i < 8; ++i) numbers.push_back(put(content(kBlock, i)));
  const int64_t large = put(content(kArena, 8));
  for (int i = 0; i < 8; ++i) EXPECT_TRUE(holds(numbers[static_cast<size_t>(i)], content(kBlock, i))) << i;
  EXPECT_TRUE(holds(large, content(kArena, 8)));
  EXPECT_TRUE(holds(numbers[3], content(kBlock, 3)));
}

/// What comes free while somebody waits for room is not taken by reading ahead, or the wait would never end.
TEST_F(Stash, MixedSizesInAnyOrder) {
  std::mt19937 random(5);
  std::vector<std::pair<int64_t, std::vector<std::byte>>> kept;
  for (int i = 0; i < 40; ++i) {
    const int64_t blocks = 1 + static_cast<int64_t>(random() % 8);
    kept.emplace_back(0, content(blocks * kBlock - i, i));
    kept.back().first = put(kept.back().second);
  }
  for (int i = 0; i < 200; ++i) {
    const auto& [number, bytes] = kept[random() % kept.size()];
    EXPECT_TRUE(holds(number, bytes)) << number;
  }
  for (const auto& [number, bytes] : kept) drop(number);
  let_transfers_end(*owners_);
  EXPECT_EQ(allocated(), 0);
}

TEST_F(Stash, AnotherSizeIsRefused) {
  const int64_t number = put(content(kBlock, 0));
  std::vector<std::byte> less(kBlock - 1);
  const MutexLock lock(owners_->core.mutex());
  EXPECT_THROW(stash_.take(number, less), std::invalid_argument);
}

TEST_F(Stash, WhatIsDroppedOnItsWayEndsWhenItArrives) {
  std::vector<int64_t> numbers;
  for (int i = 0; i < 24; ++i) numbers.push_back(put(content(kBlock, i)));
  for (const int64_t number : numbers) drop(number);  // some are being written
  let_transfers_end(*owners_);
  EXPECT_EQ(allocated(), 0);
  EXPECT_TRUE(try_put(content(kArena, 0))) << "all of the arena is free again";
}

/// Bytes that the disk gives back are those that it was given, or the engine fails.
TEST_F(Stash, AFaultOfTheDiskFailsTheEngine) {
  const std::vector<io::Faults> all{{.write_error = 1},
                                    {.read_error = 1},
                                    {.bit_flip_at_rest = 1},
                                    {.lost_write = 1},
                                    {.misdirected_write = 1}};
  for (const io::Faults& faults : all) {
    const auto owners = make(faults);
    ActivationStash stash(owners->setup, owners->core, owners->hardware);
    std::vector<int64_t> numbers;
    const auto train = [&] {
      const MutexLock lock(owners->core.mutex());
      for (int i = 0; i < 24; ++i) numbers.push_back(*stash.put(content(kBlock, i)));
      for (int i = 23; i >= 0; --i) {
        std::vector<std::byte> found(kBlock);
        stash.take(numbers[static_cast<size_t>(i)], found);
        EXPECT_EQ(found, content(kBlock, i)) << i;
      }
    };
    try {
      train();
      ADD_FAILURE() << "a fault was not told";
    } catch (const engine::EngineFailed& error) {
      EXPECT_NE(std::string(error.what()).find("activations: "), std::string::npos) << error.what();
    }
    {
      const MutexLock lock(owners->core.mutex());
      for (const int64_t number : numbers) stash.drop(number);  // as the graph does when it ends
    }
    let_transfers_end(*owners);
  }
}

class FullStore final : public AroundStore {
 public:
  FullStore(std::unique_ptr<io::Store> store, bool& full) : AroundStore(std::move(store)), full_(full) {}
  io::Extent allocate(int64_t bytes) override {
    if (full_)
      throw io::StoreError(
          {.kind = io::ErrorKind::no_space, .operation = io::Operation::reserve, .path = "/full"});
    return AroundStore::allocate(bytes);
  }

 private:
  bool& full_;
};

TEST(StashOnAFullDisk, KeepsWhatItHasAndGoesOnWhenThereIsRoom) {
  bool full = true;
  auto owners = make_owners({.change_plan = [](engine::Plan& plan) { plan.activations_host_bytes = kArena; },
                             .around_store =
                                 [&](std::unique_ptr<io::Store> store) {
                                   return std::make_unique<FullStore>(std::move(store), full);
                                 }});
  ActivationStash stash(owners->setup, owners->core, owners->hardware);
  const std::vector<std::byte> bytes(kBlock, std::byte{7});
  {
    const MutexLock lock(owners->core.mutex());
    std::vector<int64_t> numbers;
    for (int i = 0; i < 8; ++i) numbers.push_back(*stash.put(bytes));
    for (int i = 0; i < 2; ++i) EXPECT_THROW(stash.put(bytes), io::StoreError);
    std::vector<std::byte> found(kBlock);
    for (const int64_t number : numbers) {
      std::ranges::fill(found, std::byte{0});
      stash.take(number, found);
      EXPECT_EQ(found, bytes);
    }
    full = false;
    for (int i = 0; i < 8; ++i) EXPECT_TRUE(stash.put(bytes));
    std::ranges::fill(found, std::byte{0});
    stash.take(numbers[0], found);
    EXPECT_EQ(found, bytes);
  }
  let_transfers_end(*owners);
}

TEST_F(Stash, ThreadsPutAndHoldAtOnce) {
  auto owners = make_owners(
      {.time = nullptr, .change_plan = [](engine::Plan& plan) { plan.activations_host_bytes = 4 * kArena; }});
  {
    ActivationStash stash(owners->setup, owners->core, owners->hardware);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int round = 0; round < 8; ++round) {
          std::vector<int64_t> numbers;
          for (int i = 0; i < 16; ++i) {
            const auto bytes = content(kBlock, 1000 * t + i);
            const MutexLock lock(owners->core.mutex());
            numbers.push_back(*stash.put(bytes));
          }
          for (int i = 15; i >= 0; --i) {
            const MutexLock lock(owners->core.mutex());
            std::vector<std::byte> found(kBlock);
            stash.take(numbers[static_cast<size_t>(i)], found);
            EXPECT_EQ(found, content(kBlock, 1000 * t + i));
            stash.drop(numbers[static_cast<size_t>(i)]);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    owners->core.store->drain();
    EXPECT_EQ(owners->core.store->stats().allocated_bytes, 0);
  }
}

}  // namespace
}  // namespace overspill::testing
