// What bounds write-behind, and in which order it is drained: with the smallest ring and a slow store, every
// slot is in use, and the first written is the first free (docs/store.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "engine/collectives/self_communicator.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "io/memory_store.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Happening;
using engine::JournalEntry;

engine::Config smallest_config() {
  engine::Config config;
  config.nvme = {"."};
  config.threads = 2;
  config.chunk_elements = 4096;
  config.placement = engine::Placement::nvme;
  config.poison = true;
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  for (config.host_budget_bytes = 64 << 10;; config.host_budget_bytes += 16 << 10) {
    try {
      engine::make_plan(layout, config, {true});
      return config;
    } catch (const engine::BudgetError&) {
    }
  }
}

std::unique_ptr<engine::Engine> engine_of_a_slow_disk(std::chrono::microseconds delay) {
  const engine::Config config = smallest_config();
  engine::ResourceOptions options;
  options.io_backend = "memory";
  engine::Resources resources = make_resources(toy_units(), config, options);
  io::Faults slow;
  slow.delay_min = slow.delay_max = delay;
  resources.store = io::make_memory_store(64 << 20, slow, 65536);
  auto engine = std::make_unique<engine::Engine>(toy_units(), config, std::move(resources));
  toy_load(*engine);
  return engine;
}

std::vector<JournalEntry> journal_of(int steps) {
  const auto engine = engine_of_a_slow_disk(std::chrono::microseconds(300));
  engine->record_journal(true);
  for (int step = 0; step < steps; ++step) toy_step(*engine, step, 1, 0);
  engine->synchronize();
  return engine->take_journal();
}

TEST(Recording, BeginsWithWhatIsUnderWay) {
  const auto engine = engine_of_a_slow_disk(std::chrono::milliseconds(5));
  toy_step(*engine, 0, 1, 0);  // its updates read and write now
  engine->record_journal(true);
  engine->synchronize();
  const std::vector<JournalEntry> journal = engine->take_journal();
  for (const int32_t kind : {0, 1}) {
    bool busy = false;
    for (const JournalEntry& entry : journal) {
      if (entry.chunk != kind) continue;
      if (entry.happening == Happening::disk_rests) {
        EXPECT_TRUE(busy) << "the disk came to rest, and nobody had said that it was busy";
      }
      if (entry.happening == Happening::disk_busy || entry.happening == Happening::disk_rests)
        busy = entry.happening == Happening::disk_busy;
    }
  }
}

TEST(WriteBehind, HoldsNoMoreThanTheRingAndGivesItBackInOrder) {
  const engine::Config config = smallest_config();
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  const auto slots = static_cast<size_t>(engine::make_plan(layout, config, {true}).ring_slots);
  const std::vector<JournalEntry> journal = journal_of(4);

  std::vector<int32_t> held;     // slots from reading to written
  std::vector<int32_t> writing;  // in the order in which their writes were submitted
  size_t held_max = 0;
  size_t writing_max = 0;
  int64_t written = 0;
  for (const JournalEntry& entry : journal) {
    if (entry.happening == Happening::reading && std::count(held.begin(), held.end(), entry.slot) == 0)
      held.push_back(entry.slot);
    if (entry.happening == Happening::writing) writing.push_back(entry.slot);
    if (entry.happening == Happening::written) {
      ASSERT_FALSE(writing.empty());
      EXPECT_EQ(writing.front(), entry.slot) << "a slot that was written later came free first";
      writing.erase(writing.begin());
      std::erase(held, entry.slot);
      ++written;
    }
    held_max = std::max(held_max, held.size());
    writing_max = std::max(writing_max, writing.size());
  }
  EXPECT_EQ(held_max, slots) << "the ring was full, or this shows nothing";
  EXPECT_GE(writing_max, 2U) << "writes were behind, or this shows nothing";
  EXPECT_LE(writing_max, slots);
  EXPECT_GT(written, static_cast<int64_t>(slots));
}

}  // namespace
}  // namespace overspill::testing
