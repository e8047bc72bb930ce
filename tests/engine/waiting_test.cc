// Threads that wait in an engine: which updates come first for them, and that they are told, and the store
// stays until they are out, where another thread closes the engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/calls/machine.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "tests/engine/around_store.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

engine::Config config_of() {
  engine::Config config;
  config.nvme = {"/nowhere"};  // the store is in memory
  config.threads = 2;
  config.chunk_elements = 4096;
  config.placement = engine::Placement::nvme;
  config.host_budget_bytes = 64 << 20;
  return config;
}

engine::Resources resources_of(const engine::Config& config) {
  return engine::make_resources(toy_units(), config, {"host", "memory", 1});
}

std::unique_ptr<engine::Machine> machine_of(engine::Resources resources) {
  const engine::Config config = config_of();
  engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  engine::Plan plan = make_plan(layout, config, {});
  return std::make_unique<engine::Machine>(std::move(layout), std::move(plan), config, std::move(resources));
}

constexpr const char* kClosedMeanwhile = "the engine was closed by another thread while this call waited";

/// A thread that waits for what never comes.
class Waiter {
 public:
  explicit Waiter(engine::Core& core) : core_(core) {
    told_ = std::async(std::launch::async, [this] {
      const MutexLock lock(core_.mutex());
      try {
        core_.wait([this] { return ++looks_, let_go_; }, engine::Cause::rest);
      } catch (const std::invalid_argument& error) {
        return std::string(error.what());
      }
      return std::string();
    });
  }
  /// Returns when it has looked twice, and so sleeps, for the mutex is free.
  void sleeps() {
    for (bool asleep = false; !asleep;) {
      const MutexLock lock(core_.mutex());
      asleep = looks_ > 2;
    }
  }
  /// What it was told; nothing where it still waits. Does not hang there.
  std::string told() {
    const bool ends = told_.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
    {
      const MutexLock lock(core_.mutex());
      let_go_ = true;
      core_.changed.notify_all();
    }
    const std::string told = told_.get();
    return ends ? told : "";
  }

 private:
  engine::Core& core_;
  int looks_ = 0;
  bool let_go_ = false;
  std::future<std::string> told_;
};

TEST(WhoeverWaits, IsWokenByTheCloseOfTheEngine) {
  const auto machine = machine_of(resources_of(config_of()));
  Waiter waiter(machine->core);
  waiter.sleeps();
  machine->shut_down();
  EXPECT_EQ(waiter.told(), kClosedMeanwhile);
}

/// What a store and its test know of one another; outlives both.
struct Visit {
  std::mutex mutex;
  std::condition_variable changed;
  bool begun = false;
  bool closing = false;  // of SlowlyRead
  bool store_is_gone = false;
  bool gone_meanwhile = false;
};

/// Its first poll() lasts until the store is gone, or for a moment where the store rightly stays.
class SlowlyPolled final : public AroundStore {
 public:
  SlowlyPolled(std::unique_ptr<io::Store> store, std::shared_ptr<Visit> visit)
      : AroundStore(std::move(store)), visit_(std::move(visit)) {}
  ~SlowlyPolled() override {
    const std::lock_guard lock(visit_->mutex);
    visit_->store_is_gone = true;
    visit_->changed.notify_all();
  }
  bool poll() override {
    const std::shared_ptr<Visit> visit = visit_;
    std::unique_lock lock(visit->mutex);
    if (std::exchange(visit->begun, true)) return false;
    visit->changed.notify_all();
    visit->changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return visit->store_is_gone; });
    visit->gone_meanwhile = visit->store_is_gone;
    return false;
  }

 private:
  const std::shared_ptr<Visit> visit_;
};

TEST(WhoeverWaits, KeepsTheStoreThatItPolls) {
  const auto visit = std::make_shared<Visit>();
  engine::Resources resources = resources_of(config_of());
  resources.store = std::make_unique<SlowlyPolled>(std::move(resources.store), visit);
  const auto machine = machine_of(std::move(resources));
  Waiter waiter(machine->core);
  {
    std::unique_lock lock(visit->mutex);
    visit->changed.wait(lock, [&] { return visit->begun; });
  }
  machine->shut_down();
  EXPECT_EQ(waiter.told(), kClosedMeanwhile);
  const std::lock_guard lock(visit->mutex);
  EXPECT_FALSE(visit->gone_meanwhile);
}

// ---- who waits for updates

/// Keeps reads back from when it is told to until it lets them go.
class HeldReads final : public AroundStore {
 public:
  using AroundStore::AroundStore;
  void submit(io::Transfer& transfer) override {
    {
      const std::lock_guard lock(mutex_);
      if (holds_ && transfer.kind == io::Transfer::Kind::read) return held_.push_back(&transfer);
    }
    AroundStore::submit(transfer);
  }
  void hold() {
    const std::lock_guard lock(mutex_);
    holds_ = true;
  }
  void let_go() {
    std::vector<io::Transfer*> held;
    {
      const std::lock_guard lock(mutex_);
      holds_ = false;
      held.swap(held_);
    }
    for (io::Transfer* transfer : held) AroundStore::submit(*transfer);
  }

 private:
  std::mutex mutex_;
  bool holds_ = false;
  std::vector<io::Transfer*> held_;
};

/// With a ring of two slots.
engine::Config smallest(engine::Config config) {
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  for (config.host_budget_bytes = 64 << 10;; config.host_budget_bytes += 4 << 10) {
    try {
      (void)make_plan(layout, config, {});
      return config;
    } catch (const engine::BudgetError&) {
    }
  }
}

/// Two callers wait for the last two units, and all of these units' chunks are updated before the rest.
TEST(WhoeverWaits, ForUpdatesGetsThemFirstAlsoWhereOthersWaitForTheirs) {
  engine::Config config = config_of();
  config.threads = 1;
  config.prefetch_units = 0;
  config.chunk_elements = 2048;
  config = smallest(config);
  engine::Resources resources = resources_of(config);
  auto around = std::make_unique<HeldReads>(std::move(resources.store));
  HeldReads& store = *around;
  resources.store = std::move(around);
  engine::Engine engine(toy_units(), config, std::move(resources));
  toy_load(engine);
  toy_step(engine, 0, 1, 0);
  engine.synchronize();
  for (int u = 0; u < 6; ++u) {
    const engine::Unit& unit = engine.layout().units[u];
    for (int s = 0; unit.trainable() && s < static_cast<int>(unit.segments.size()); ++s) {
      const std::vector<float> seen(static_cast<size_t>(unit.segments[s].elements), 0.5F);
      toy_add_gradient_always(engine, seen, u, s, 1, 0, 0);
    }
  }
  engine.record_journal(true);
  store.hold();
  engine.step(toy_groups(1));
  std::vector<std::future<void>> callers;
  for (const int u : {4, 5})
    callers.push_back(std::async(std::launch::async, [&, u] { (void)engine.acquire(u); }));
  std::vector<engine::JournalEntry> journal;
  const auto read_journal = [&] {
    const auto more = engine.take_journal();
    journal.insert(journal.end(), more.begin(), more.end());
    std::set<int32_t> units;  // the callers'; step() may have waited too, for none
    for (const engine::JournalEntry& entry : journal)
      if (entry.happening == engine::Happening::waiting && entry.unit >= 4) units.insert(entry.unit);
    return units.size();
  };
  while (read_journal() < 2) std::this_thread::yield();
  store.let_go();
  for (auto& caller : callers) caller.get();
  engine.synchronize();
  read_journal();

  std::set<int32_t> demanded, rest, in_slots;  // chunks; in_slots: before the two came
  std::vector<bool> updated_demanded;          // one after the other, beyond in_slots
  std::set<int32_t> waiting;                   // units
  for (const engine::JournalEntry& entry : journal) {
    const bool of_them = entry.unit >= 4;
    if (entry.happening == engine::Happening::waiting && of_them) waiting.insert(entry.unit);
    if (entry.happening == engine::Happening::scheduled) (of_them ? demanded : rest).insert(entry.chunk);
    if (entry.happening == engine::Happening::reading && waiting.size() < 2) in_slots.insert(entry.chunk);
    if (entry.happening == engine::Happening::updated && !in_slots.contains(entry.chunk))
      updated_demanded.push_back(of_them);
  }
  ASSERT_EQ(in_slots.size(), 2U);
  for (const int32_t chunk : in_slots) EXPECT_TRUE(rest.contains(chunk)) << chunk;
  ASSERT_GT(demanded.size(), 2U);
  ASSERT_EQ(updated_demanded.size(), demanded.size() + rest.size() - in_slots.size());
  EXPECT_TRUE(std::ranges::is_sorted(updated_demanded, std::greater<>())) << "the rest came between";
}

/// Its first read begins when the engine is being closed, and waits as SlowlyPolled does.
class SlowlyRead final : public AroundStore {
 public:
  SlowlyRead(std::unique_ptr<io::Store> store, std::shared_ptr<Visit> visit)
      : AroundStore(std::move(store)), visit_(std::move(visit)) {}
  ~SlowlyRead() override {
    const std::lock_guard lock(visit_->mutex);
    visit_->store_is_gone = true;
    visit_->changed.notify_all();
  }
  void submit(io::Transfer& transfer) override {
    if (transfer.kind == io::Transfer::Kind::read) visit();
    AroundStore::submit(transfer);
  }

 private:
  void visit() {
    const std::shared_ptr<Visit> visit = visit_;
    std::unique_lock lock(visit->mutex);
    if (std::exchange(visit->begun, true)) return;
    visit->changed.notify_all();
    visit->changed.wait(lock, [&] { return visit->closing; });
    visit->changed.wait_for(lock, std::chrono::milliseconds(100), [&] { return visit->store_is_gone; });
    visit->gone_meanwhile = visit->store_is_gone;
    if (visit->gone_meanwhile) throw std::logic_error("the store went while somebody read from it");
  }

  const std::shared_ptr<Visit> visit_;
};

/// Callers make one such call at a time, and no close() beside it (engine.h). Where one does, it gets an
/// error.
TEST(WhoeverReads, KeepsTheStoreThatItReadsFrom) {
  const auto visit = std::make_shared<Visit>();
  engine::Resources resources = resources_of(config_of());
  resources.store = std::make_unique<SlowlyRead>(std::move(resources.store), visit);
  const auto machine = machine_of(std::move(resources));
  constexpr int64_t kElements = 6208;  // of unit 0: two chunks
  std::vector<std::byte> weights(kElements * 2);
  machine->access.write(0, engine::Component::hi, 0, weights);
  visit->begun = visit->closing = false;
  auto told = std::async(std::launch::async, [&] {
    try {
      machine->access.read(0, engine::Component::hi, 0, weights);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string();
  });
  {
    std::unique_lock lock(visit->mutex);
    visit->changed.wait(lock, [&] { return visit->begun; });
  }
  auto closed = std::async(std::launch::async, [&] { machine->shut_down(); });
  for (bool closing = false; !closing;) {
    const MutexLock lock(machine->core.mutex());
    closing = !machine->core.failure.empty();
  }
  {
    const std::lock_guard lock(visit->mutex);
    visit->closing = true;
    visit->changed.notify_all();
  }
  EXPECT_EQ(told.get(), kClosedMeanwhile);
  closed.get();
  EXPECT_FALSE(visit->gone_meanwhile);
  EXPECT_THROW(machine->access.read(0, engine::Component::hi, 0, weights), std::invalid_argument);
}

}  // namespace
}  // namespace overspill::testing
