// The gatherer made alone: what it reads, keeps, gives up and refuses. The whole is in schedule_test.cc, of
// several ranks in ranks_test.cc and gathering_test.cc.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/engine_failed.h"
#include "engine/weights/gather.h"
#include "io/memory_store.h"
#include "tests/engine/parts.h"
#include "tests/io/store_test_util.h"

namespace overspill::testing {
namespace {

using engine::Block;
using engine::Component;
using engine::Gathered;
using engine::Gatherer;

constexpr int64_t kElements = 8192;            // of each unit: two chunks
constexpr int64_t kUnitBytes = kElements * 2;  // in bf16
constexpr int32_t kUnits = 4;

std::vector<engine::UnitSpec> equal_units() {
  std::vector<engine::UnitSpec> units;
  for (int32_t u = 0; u < kUnits; ++u) {
    const std::string name = fmt::format("layer{}", u);
    units.push_back({name, optim::Format::exact, "BF16", {{name + ".weight", {kElements}, 0, {}}}});
  }
  return units;
}

/// Units of one size, on NVMe, and room for two of them.
class Gathering : public ::testing::Test {
 protected:
  explicit Gathering(int64_t units_ahead = 0,
                     std::shared_ptr<io::VirtualTime> time = std::make_shared<io::VirtualTime>())
      : owners_(make(units_ahead, std::move(time))),
        gatherer_(owners_->setup, owners_->core, owners_->hardware, owners_->model, owners_->demand) {
    for (int32_t chunk = 0; chunk < std::ssize(owners_->model.chunks); ++chunk) {
      io::AlignedMemory bytes(owners_->setup.component_bytes(chunk, Component::hi));
      std::ranges::fill(bytes.all(), value_of(chunk));
      put_in_store(*owners_, chunk, Component::hi, bytes.all());
    }
  }

  ~Gathering() override { owners_->core.store->drain(); }  // into the gatherer's memory

  static std::unique_ptr<Owners> make(int64_t units_ahead, std::shared_ptr<io::VirtualTime> time) {
    OwnersOptions options;
    options.time = std::move(time);
    options.units = equal_units();
    options.config.prefetch_units = units_ahead;
    options.change_plan = [](engine::Plan& plan) { plan.gather_host_bytes = 2 * kUnitBytes; };
    return make_owners(std::move(options));
  }

  static std::byte value_of(int32_t chunk) { return std::byte{static_cast<uint8_t>(0x10 + chunk)}; }

  /// What a caller sees who leases the unit: whether every chunk's weights are where they belong.
  void expect_weights_of(int32_t unit, const Block& block) {
    const engine::Unit& layout = owners_->setup.layout.units[unit];
    for (int32_t chunk = layout.first_chunk; chunk < layout.first_chunk + layout.chunk_count; ++chunk) {
      const engine::Chunk& c = owners_->setup.layout.chunks[chunk];
      const std::byte* const begin = block.device + c.begin * layout.element_bytes;
      const int64_t bytes = c.elements * layout.element_bytes;
      EXPECT_EQ(std::count(begin, begin + bytes, value_of(chunk)), bytes) << "chunk " << chunk;
    }
  }

  Block* acquire(int32_t unit) REQUIRES(engine::engine_mutex) {
    gatherer_.trace().acquired(unit);
    return gatherer_.acquire(unit);
  }

  /// Leases it and ends the lease.
  void pass(int32_t unit) REQUIRES(engine::engine_mutex) { gatherer_.release(acquire(unit), {}); }

  /// Of chunks so far, beside the writes of the constructor.
  int64_t reads() const { return owners_->core.store->stats().transfers - std::ssize(owners_->model.chunks); }

  std::unique_ptr<Owners> owners_;
  Gatherer gatherer_;
};

TEST_F(Gathering, ReadsAUnitsChunksIntoOneBlock) {
  const MutexLock lock(owners_->core.mutex());
  for (int32_t unit = 0; unit < kUnits; ++unit) {
    Block* const block = acquire(unit);
    EXPECT_TRUE(gatherer_.ready(unit));
    expect_weights_of(unit, *block);
    gatherer_.release(block, {});
  }
}

TEST_F(Gathering, ReadsWhatIsThereOnce) {
  const MutexLock lock(owners_->core.mutex());
  pass(0);
  const int64_t before = reads();
  EXPECT_EQ(before, 2) << "of two chunks";
  pass(0);
  EXPECT_EQ(reads(), before);
  gatherer_.invalidate(std::vector<int32_t>{0});
  EXPECT_FALSE(gatherer_.ready(0)) << "its weights change";
  pass(0);
  EXPECT_EQ(reads(), before + 2);
}

/// Belady's rule. The pass acquires 0, 1, 2, 0, 3, 1. When 2 wants room, 0 comes before 1, though it was used
/// longer ago; when 3 does, 1 comes at once, and 0 before 2, since the next pass is taken to be alike.
TEST_F(Gathering, GivesUpTheUnitThatIsNeededLast) {
  const MutexLock lock(owners_->core.mutex());
  gatherer_.trace().begin({true, true});
  for (const int32_t unit : {0, 1, 2, 0, 3, 1}) pass(unit);
  gatherer_.trace().begin({true, true});
  gatherer_.invalidate(std::vector<int32_t>{0, 1, 2, 3});
  pass(0);
  pass(1);
  pass(2);
  EXPECT_TRUE(gatherer_.ready(0));
  EXPECT_FALSE(gatherer_.ready(1));
  const int64_t before = reads();
  pass(0);
  EXPECT_EQ(reads(), before);
  pass(3);
  EXPECT_TRUE(gatherer_.ready(0));
  EXPECT_FALSE(gatherer_.ready(2));
}

TEST_F(Gathering, GivesUpNoUnitThatIsLeased) {
  const MutexLock lock(owners_->core.mutex());
  Block* const held = acquire(0);
  pass(1);
  pass(2);
  EXPECT_TRUE(gatherer_.ready(0));
  EXPECT_FALSE(gatherer_.ready(1));
  expect_weights_of(0, *held);
  Block* const other = acquire(1);
  try {
    (void)acquire(2);
    ADD_FAILURE() << "two units have room, and both are leased";
  } catch (const engine::BudgetError& error) {
    const std::string what = error.what();
    for (const char* part : {"layer2", "layer0", "layer1", "16384"}) {
      EXPECT_NE(what.find(part), std::string::npos) << part << " is not in: " << what;
    }
  }
  gatherer_.release(held, {});
  expect_weights_of(1, *other);
  pass(2);
  gatherer_.release(other, {});
}

TEST_F(Gathering, WhoLeasesOldWeightsKeepsThemAndTheNextGetsTheNew) {
  const MutexLock lock(owners_->core.mutex());
  Block* const old = acquire(0);
  gatherer_.invalidate(std::vector<int32_t>{0});
  EXPECT_TRUE(old->orphan);
  Block* const fresh = acquire(0);
  EXPECT_NE(fresh, old);
  EXPECT_NE(fresh->device, old->device);
  expect_weights_of(0, *old);
  expect_weights_of(0, *fresh);
  EXPECT_THROW((void)acquire(1), engine::BudgetError) << "the orphan takes room";
  gatherer_.release(old, {});
  pass(1);
  gatherer_.release(fresh, {});
}

TEST_F(Gathering, AReadThatFailsFailsTheEngineAndNamesTheUnit) {
  const engine::Chunk& chunk = owners_->setup.layout.chunks[5];
  auto& store = dynamic_cast<io::MemoryStore&>(*owners_->core.store);
  store.flip_bit(owners_->model.chunks[5].extents[0], 77);
  const MutexLock lock(owners_->core.mutex());
  EXPECT_THROW((void)acquire(chunk.unit), engine::EngineFailed);
  EXPECT_NE(owners_->core.failure.find("layer2"), std::string::npos) << owners_->core.failure;
}

/// One unit ahead of the trace.
class GatheringAhead : public Gathering {
 protected:
  explicit GatheringAhead(std::shared_ptr<io::VirtualTime> time = std::make_shared<io::VirtualTime>())
      : Gathering(1, std::move(time)) {
    const MutexLock lock(owners_->core.mutex());
    gatherer_.trace().begin({true, true});
    for (int32_t unit = 0; unit < kUnits; ++unit) pass(unit);
    gatherer_.trace().begin({true, true});  // the pass that was recorded is expected again
    gatherer_.invalidate(std::vector<int32_t>{0, 1, 2, 3});
    before_ = reads();
  }

  void let_reads_end() REQUIRES(engine::engine_mutex) {
    const engine::Unlocked unlocked(owners_->core.mutex());
    let_transfers_end(*owners_);
  }

  /// From now on the update of the unit is to come.
  void expect_update(int32_t unit) REQUIRES(engine::engine_mutex) { set_pending(unit, true); }
  /// The update of the unit puts weights into its block.
  void update(int32_t unit) REQUIRES(engine::engine_mutex) {
    const engine::Unit& layout = owners_->setup.layout.units[unit];
    for (int32_t c = layout.first_chunk; c < layout.first_chunk + layout.chunk_count; ++c) {
      const std::vector<std::byte> fresh(
          static_cast<size_t>(owners_->setup.component_bytes(c, Component::hi)), value_of(c));
      gatherer_.deliver(c, fresh.data());
    }
    set_pending(unit, false);
  }

  int64_t before_ = 0;

 private:
  void set_pending(int32_t unit, bool pending) REQUIRES(engine::engine_mutex) {
    const engine::Unit& layout = owners_->setup.layout.units[unit];
    owners_->model.units[unit].pending_chunks = pending ? layout.chunk_count : 0;
    for (int32_t c = layout.first_chunk; c < layout.first_chunk + layout.chunk_count; ++c)
      owners_->model.chunks[c].pending = pending;
  }
};

TEST_F(GatheringAhead, ReadsTheUnitThatComesNext) {
  const MutexLock lock(owners_->core.mutex());
  gatherer_.prefetch();
  EXPECT_EQ(owners_->model.units[0].gathered, Gathered::filling);
  EXPECT_EQ(owners_->model.units[1].gathered, Gathered::absent);
  let_reads_end();
  EXPECT_TRUE(gatherer_.ready(0));
  Block* const block = acquire(0);
  EXPECT_EQ(owners_->model.units[1].gathered, Gathered::filling);
  expect_weights_of(0, *block);
  gatherer_.release(block, {});
}

/// A chunk whose update is to come is not read: the worker who updates it brings the new weights.
TEST_F(GatheringAhead, WaitsForTheUpdateOfAChunk) {
  const MutexLock lock(owners_->core.mutex());
  owners_->model.chunks[1].pending = true;
  gatherer_.prefetch();
  let_reads_end();
  EXPECT_EQ(owners_->model.units[0].gathered, Gathered::filling);
  EXPECT_EQ(reads(), before_ + 1) << "of the other chunk";
  const std::byte updated{0x77};
  std::vector<std::byte> fresh(static_cast<size_t>(owners_->setup.component_bytes(1, Component::hi)),
                               updated);
  gatherer_.deliver(1, fresh.data());
  std::ranges::fill(fresh, std::byte{0xEE});  // the worker's memory is its own again
  EXPECT_TRUE(gatherer_.ready(0));
  Block* const block = acquire(0);
  const std::byte* const begin = block->device;
  EXPECT_EQ(std::count(begin, begin + kUnitBytes, updated), kUnitBytes / 2);
  EXPECT_EQ(std::count(begin, begin + kUnitBytes, value_of(0)), kUnitBytes / 2);
  gatherer_.release(block, {});
}

/// Beyond prefetch_units (1 here): nobody has to read what the update has in memory.
TEST_F(GatheringAhead, AUnitWhoseUpdateIsToComeGetsRoomBeforeItsTurn) {
  const MutexLock lock(owners_->core.mutex());
  expect_update(1);
  gatherer_.prefetch();
  EXPECT_EQ(owners_->model.units[1].gathered, Gathered::filling);
  EXPECT_EQ(owners_->model.units[2].gathered, Gathered::absent) << "no room, and no update is to come";
  let_reads_end();
  EXPECT_EQ(reads(), before_ + 2) << "of the unit that comes next";
  update(1);
  pass(0);
  EXPECT_TRUE(gatherer_.ready(1));
  Block* const block = acquire(1);
  expect_weights_of(1, *block);
  gatherer_.release(block, {});
}

/// In real time.
class GatheringBesideUpdates : public GatheringAhead {
 protected:
  GatheringBesideUpdates() : GatheringAhead(nullptr) {}
};

/// Whoever asks for a unit that was not predicted waits for the first room, not for all updates that units
/// wait for.
TEST_F(GatheringBesideUpdates, WhatWasNotPredictedWaitsForOneOfThem) {
  std::jthread worker;  // ends after the lock, also where acquire() throws
  {
    const MutexLock lock(owners_->core.mutex());
    for (const int32_t unit : {0, 1}) expect_update(unit);
    gatherer_.prefetch();
    ASSERT_EQ(owners_->model.units[1].gathered, Gathered::filling);
    worker = std::jthread([this] {
      for (const int32_t unit : {0, 1}) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        const MutexLock at_work(owners_->core.mutex());
        update(unit);
        owners_->core.changed.notify_all();
      }
    });
    Block* const block = acquire(3);
    EXPECT_EQ(owners_->model.units[1].gathered, Gathered::filling);
    expect_weights_of(3, *block);
    gatherer_.release(block, {});
  }
}

/// Who waits for a unit gets it, though another wants the room before the first has woken up.
TEST_F(GatheringAhead, GivesUpNoUnitThatACallerWaitsFor) {
  const MutexLock lock(owners_->core.mutex());
  gatherer_.prefetch();
  let_reads_end();
  ASSERT_TRUE(gatherer_.ready(0));
  gatherer_.trace().acquired(0);  // from now on it is the unit that is needed last
  const engine::Awaiting awaiting(owners_->demand, 0);
  gatherer_.release(gatherer_.acquire(2), {});
  gatherer_.release(gatherer_.acquire(3), {});
  EXPECT_TRUE(gatherer_.ready(0));
  EXPECT_FALSE(gatherer_.ready(2));
}

}  // namespace
}  // namespace overspill::testing
