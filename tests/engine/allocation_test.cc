// What a step asks of the heap once it is warm, on NVMe with spilled gradients: nothing (STYLE: after the
// start the step path allocates nothing). And over many steps: the same memory, the same descriptors, the
// same free room in the arena.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "cpu_optim/optimizer.h"
#include "engine/engine.h"
#include "engine/resources.h"
#include "tests/allocation_watch.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

constexpr int kUnits = 10;
constexpr int64_t kElements = 48 * 1024;

/// A model whose units differ in size, and its gradients, made once.
class Training {
 public:
  explicit Training(int64_t micro_batches) : micro_batches_(micro_batches) {
    for (int u = 0; u < kUnits; ++u) {
      const int64_t elements = kElements * (u == 0 ? 4 : 1) / 64;
      units_.push_back(
          {fmt::format("u{}", u),
           optim::Format::exact,
           "BF16",
           {{fmt::format("w{}", u), {elements, 48}, 0, {}}, {fmt::format("b{}", u), {elements, 16}, 1, {}}}});
    }
    engine::Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = {std::filesystem::temp_directory_path()};
    config.job = fmt::format("allocations-{}", ::getpid());
    config.threads = 2;
    config.chunk_elements = 8192;
    config.prefetch_units = 2;
    config.gradient_accumulation = micro_batches;
    config.max_grad_norm = 1.0;
    config.placement = engine::Placement::nvme;
    engine_ = std::make_unique<engine::Engine>(units_, config, make_resources(units_, config, {}));
    toy_load(*engine_);
    gradient_.assign(kElements * 4, 0x3C00);
    groups_ = toy_groups(0);
  }

  void step() {
    for (int64_t micro = 0; micro < micro_batches_; ++micro) {
      engine_->begin_pass({true, true});
      for (int u = 0; u < kUnits; ++u) engine_->acquire(u);
      for (int u = kUnits - 1; u >= 0; --u) {
        const engine::Lease lease = engine_->acquire(u);
        const auto& segments = engine_->layout().units[u].segments;
        for (int s = 1; s >= 0; --s) {
          const auto all = std::as_bytes(std::span(gradient_));
          engine_->add_gradient(u, s, all.first(static_cast<size_t>(segments[s].elements * 2)), "BF16");
        }
      }
    }
    engine_->step(groups_);
  }
  engine::Engine& engine() { return *engine_; }

 private:
  int64_t micro_batches_;
  std::vector<engine::UnitSpec> units_;
  std::unique_ptr<engine::Engine> engine_;
  std::vector<uint16_t> gradient_;
  std::vector<optim::Hyper> groups_;
};

class Steps : public ::testing::TestWithParam<int64_t> {};

TEST_P(Steps, AskNothingOfTheHeapOnceTheyAreWarm) {
  Training run(GetParam());
  for (int step = 0; step < 20; ++step) run.step();  // the store's table of extents grows to its size
  watch_allocations();
  for (int step = 20; step < 30; ++step) run.step();
  EXPECT_EQ(stop_watching_allocations(), 0);
}

INSTANTIATE_TEST_SUITE_P(MicroBatches, Steps, ::testing::Values(1, 3));

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0;
  int64_t resident = 0;
  file >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

int64_t descriptors() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

TEST(ManySteps, KeepMemoryDescriptorsAndTheArenaAsTheyWere) {
  const char* asked = std::getenv("OVERSPILL_STEPS");
  const int steps = asked != nullptr ? std::atoi(asked) : 200;
  Training run(1);
  for (int step = 0; step < 20; ++step) run.step();
  run.engine().synchronize();
  const int64_t resident = resident_bytes();
  const int64_t open = descriptors();
  const int64_t free_run = run.engine().stats().gather_free_run_bytes;
  const int64_t on_nvme = run.engine().stats().store.allocated_bytes;
  EXPECT_GT(free_run, 0);
  int64_t most = 0;
  for (int step = 20; step < steps; ++step) {
    run.step();
    if (step % 20 != 19) continue;
    run.engine().synchronize();  // step() gave up what was gathered: the arena is empty
    most = std::max(most, resident_bytes());
    ASSERT_EQ(run.engine().stats().gather_free_run_bytes, free_run) << "step " << step;
    ASSERT_EQ(run.engine().stats().store.allocated_bytes, on_nvme) << "step " << step;
    ASSERT_EQ(descriptors(), open) << "step " << step;
  }
  fmt::print("{} steps: {} bytes resident at 20, {} at most; largest free run {}; {} descriptors\n", steps,
             resident, most, free_run, open);
  EXPECT_LE(most, resident + (1 << 20));
}

}  // namespace
}  // namespace overspill::testing
