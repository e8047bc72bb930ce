// The snapshot alone: each chunk is taken once, by whoever comes first, as it is after its scheduled update.
#include "engine/states/snapshot.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "engine/base/engine_failed.h"
#include "engine/checkpoint/manifest.h"
#include "tests/engine/parts.h"

namespace overspill::testing {
namespace {

using engine::CheckpointError;

/// Counts what it is given; may fail, or keep whoever writes waiting.
class CountingTaker final : public engine::Snapshot::Taker {
 public:
  explicit CountingTaker(size_t chunks) : pinned(chunks), written(chunks) {}
  void pin(int32_t chunk) override { ++pinned[static_cast<size_t>(chunk)]; }
  void write(int32_t chunk) override {
    if (chunk == fails_at) throw CheckpointError("the disk is full");
    ++written[static_cast<size_t>(chunk)];
  }
  std::vector<int> pinned, written;
  int32_t fails_at = -1;
};

struct Marked {
  explicit Marked(const std::function<void(Owners&)>& before = [](Owners&) {}) : owners(make_owners()) {
    before(*owners);
    const MutexLock lock(owners->core.mutex());
    snapshot.mark(taker);
  }
  void before_change(int32_t chunk) {
    const MutexLock lock(owners->core.mutex());
    snapshot.before_change(chunk);
  }
  engine::Saving saving(int32_t chunk) {
    const MutexLock lock(owners->core.mutex());
    return owners->model.chunks[static_cast<size_t>(chunk)].saving;
  }

  std::unique_ptr<Owners> owners;
  engine::Snapshot snapshot{owners->core, owners->model};
  CountingTaker taker{owners->model.chunks.size()};
};

TEST(Snapshot, TakesEachChunkOnceWhoeverComesFirst) {
  Marked m;
  m.before_change(2);
  EXPECT_EQ(m.taker.written[2], 1);
  m.before_change(2);  // changed again
  m.snapshot.take_all();
  EXPECT_EQ(m.taker.written, std::vector<int>(m.taker.written.size(), 1));
  EXPECT_EQ(m.taker.pinned, m.taker.written);
  m.before_change(1);
  EXPECT_EQ(m.taker.written[1], 1) << "it is over";
}

TEST(Snapshot, LetsTheScheduledUpdateGoFirst) {
  Marked m([](Owners& owners) {
    const MutexLock lock(owners.core.mutex());
    owners.model.chunks[1].pending = true;
  });
  m.before_change(1);
  EXPECT_EQ(m.taker.written[1], 0) << "this update belongs to the snapshot";
  {
    const MutexLock lock(m.owners->core.mutex());
    m.owners->model.chunks[1].pending = false;
    m.snapshot.updated(1);
  }
  m.before_change(1);
  EXPECT_EQ(m.taker.written[1], 1) << "and the next one does not";
  m.snapshot.take_all();
}

TEST(Snapshot, WaitsForAnUpdateThatIsStillToCome) {
  Marked m([](Owners& owners) {
    const MutexLock lock(owners.core.mutex());
    owners.model.chunks[0].pending = true;
  });
  std::atomic<bool> over = false;
  std::thread taking([&] {
    m.snapshot.take_all();
    over = true;
  });
  while (m.saving(1) != engine::Saving::due) std::this_thread::yield();
  EXPECT_FALSE(over);
  {
    const MutexLock lock(m.owners->core.mutex());
    m.owners->model.chunks[0].pending = false;
    m.snapshot.updated(0);
    m.owners->core.changed.notify_all();
  }
  taking.join();
  EXPECT_EQ(m.taker.written, std::vector<int>(m.taker.written.size(), 1));
}

TEST(Snapshot, ThatFailsOnAWorkerLetsTheWorkerGoOn) {
  Marked m;
  m.taker.fails_at = 3;
  m.before_change(3);
  EXPECT_THROW(m.snapshot.take_all(), CheckpointError);
  m.before_change(0);
  EXPECT_EQ(m.taker.written[0], 0) << "it was given up";
  const MutexLock lock(m.owners->core.mutex());
  m.snapshot.wait();  // does not
  EXPECT_FALSE(m.snapshot.under_way());
}

TEST(Snapshot, OfAnEngineThatFailsEnds) {
  Marked m([](Owners& owners) {
    const MutexLock lock(owners.core.mutex());
    owners.model.chunks[0].pending = true;
  });
  std::thread failing([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const MutexLock lock(m.owners->core.mutex());
    m.owners->core.fail("a disk is gone");
  });
  EXPECT_THROW(m.snapshot.take_all(), engine::EngineFailed);
  failing.join();
}

}  // namespace
}  // namespace overspill::testing
