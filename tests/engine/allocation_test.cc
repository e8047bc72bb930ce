// What a step asks of the heap once it is warm, on NVMe with spilled gradients: nothing (STYLE: after the
// start the step path allocates nothing). And over many steps: the same memory, the same descriptors, the
// same free room in the arena.
#include <execinfo.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/resources.h"
#include "tests/engine/toy_model.h"

namespace {

/// Call sites of operator new while it is on; without allocating anything itself.
class Watch {
 public:
  static constexpr int kDepth = 12;
  struct Site {
    std::array<void*, kDepth> frames{};
    int64_t times = 0;
  };
  void start() { on_ = true; }
  void stop() { on_ = false; }
  void saw() {
    if (!on_) return;
    const std::lock_guard guard(mutex_);
    ++total_;
    std::array<void*, kDepth> frames{};
    ::backtrace(frames.data(), kDepth);
    for (Site& site : sites_) {
      if (site.times > 0 && site.frames != frames) continue;
      site.frames = frames;
      ++site.times;
      return;
    }
  }
  int64_t total() const { return total_; }
  /// For addr2line -Cfie.
  void print() const {
    for (const Site& site : sites_) {
      if (site.times == 0) break;
      fmt::print("{} times:\n", site.times);
      std::fflush(stdout);
      ::backtrace_symbols_fd(site.frames.data() + 2, kDepth - 2, STDOUT_FILENO);
    }
  }

 private:
  std::atomic<bool> on_ = false;
  std::mutex mutex_;
  int64_t total_ = 0;
  std::array<Site, 64> sites_;
};
Watch watch;

}  // namespace

// noinline: the compiler must not pair what it sees of new with the free() in delete.
[[gnu::noinline]] void* operator new(size_t bytes) {
  watch.saw();
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t alignment) {
  watch.saw();
  const size_t unit = static_cast<size_t>(alignment);
  if (void* memory = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}

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
  std::array<void*, 2> warm{};
  ::backtrace(warm.data(), 2);  // it loads a library the first time
  Training run(GetParam());
  for (int step = 0; step < 20; ++step) run.step();  // the store's table of extents grows to its size
  const int64_t before = watch.total();
  watch.start();
  for (int step = 20; step < 30; ++step) run.step();
  watch.stop();
  EXPECT_EQ(watch.total() - before, 0);
  if (watch.total() > before) watch.print();
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
