// Guessed updates (DESIGN 5, speculation) where the guess turns out wrong, is disturbed, or has no room. That
// hits and misses never change a bit over placements, devices and stores is in exactness_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_optim/executor.h"
#include "cpu_optim/floating_point.h"
#include "cpu_optim/optimizer.h"
#include "engine/engine.h"
#include "engine/resources.h"
#include "io/store.h"
#include "tests/engine/around_store.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Placement;

constexpr int kUnits = 6;

Config config_of(Placement placement, bool speculate) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {"unused"};
  config.threads = 2;
  config.chunk_elements = 4096;
  config.placement = placement;
  config.speculate = speculate;
  config.poison = true;
  return config;
}

/// What is wholly on the host is guessed only beside a device: where compute leaves the CPU to the update.
engine::Resources resources_of(const Config& config, const ToyKind& kind = {}) {
  engine::ResourceOptions options;
  options.device = config.placement == Placement::host ? "simulated" : "host";
  options.io_backend = "memory";
  return engine::make_resources(toy_units(kind), config, options);
}

std::vector<optim::Hyper> groups_of(int step) {
  return {toy_group(0, step), toy_group(1, step)};
}

/// A step whose gradients do not depend on the weights, so that they can be given in any order and number.
void give_gradients(Engine& engine, int step, float scale = 1) {
  for (int32_t u = kUnits - 1; u >= 0; --u) {
    const engine::Unit& unit = engine.layout().units[u];
    for (size_t s = 0; unit.trainable() && s < unit.segments.size(); ++s) {
      std::vector<float> wide;
      for (int64_t i = 0; i < unit.segments[s].elements; ++i)
        wide.push_back(scale * toy_gradient(0.1F, u, static_cast<int>(s), i, step, 0, 0));
      std::vector<uint16_t> narrow;
      for (float g : wide) {
        uint32_t bits = 0;
        std::memcpy(&bits, &g, 4);
        narrow.push_back(static_cast<uint16_t>(bits >> 16));
      }
      const auto bytes =
          unit.element_bytes == 2 ? std::as_bytes(std::span(narrow)) : std::as_bytes(std::span(wide));
      engine.add_gradient(u, static_cast<int32_t>(s), bytes, unit.dtype);
    }
  }
}

/// Waits until what could be guessed was guessed and written.
void let_guesses_end(Engine& engine) {
  while (engine.stats().guesses_unfinished > 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
}

enum class Disturbance {
  none,
  second_backward,    // every gradient comes twice
  other_rate,         // step() is given another learning rate than was expected
  cleared,            // zero_grad() and another backward
  looked_at,          // weights are read between backward and step()
  synchronized,       // ... and everything is brought to rest
  not_finite,         // one gradient is inf: nothing changes
  weight_overwritten  // load_weight() between backward and step()
};

struct Trained {
  std::vector<float> contents;
  engine::Stats stats;
};

/// Five steps, the fourth one disturbed, with or without speculation.
Trained run(Placement placement, Disturbance disturbance, bool speculate, bool at_once, double max_norm = 0) {
  Config config = config_of(placement, speculate);
  config.max_grad_norm = max_norm;
  Engine engine(toy_units(), config, resources_of(config));
  toy_load(engine);
  for (int step = 0; step < 5; ++step) {
    engine.begin_pass({true, true});
    for (int32_t u = 0; u < kUnits; ++u) engine.acquire(u);
    engine.expect_step(groups_of(step));
    give_gradients(engine, step);
    if (!at_once) let_guesses_end(engine);
    auto groups = groups_of(step);
    if (step == 3) {
      std::vector<float> weights(97 * 64);
      const auto bytes = std::as_writable_bytes(std::span(weights));
      switch (disturbance) {
        case Disturbance::none:
          break;
        case Disturbance::second_backward:
          give_gradients(engine, 77);
          break;
        case Disturbance::other_rate:
          std::get<optim::AdamConfig>(groups[0]).lr *= 0.5;
          break;
        case Disturbance::cleared:
          engine.clear_gradients();
          give_gradients(engine, 78);
          break;
        case Disturbance::looked_at:
          engine.read_weight(0, 0, bytes, "F32");
          break;
        case Disturbance::synchronized:
          engine.synchronize();
          break;
        case Disturbance::not_finite: {
          std::vector<float> bad(5000, std::numeric_limits<float>::infinity());
          engine.add_gradient(5, 0, std::as_bytes(std::span(bad)), "F32");
          break;
        }
        case Disturbance::weight_overwritten:
          engine.load_weight(0, 0, bytes, "F32");
          break;
      }
    }
    EXPECT_EQ(engine.step(groups).skipped, step == 3 && disturbance == Disturbance::not_finite);
  }
  Trained out;
  out.contents = toy_contents(engine);
  engine.clear_gradients();  // else those of the last step keep their extents
  out.stats = engine.stats();
  return out;
}

class Disturbed : public ::testing::TestWithParam<std::tuple<Placement, Disturbance, bool>> {};

TEST_P(Disturbed, EqualsTheSameRunWithoutGuesses) {
  const auto [placement, disturbance, at_once] = GetParam();
  const Trained plain = run(placement, disturbance, false, at_once);
  const Trained guessed = run(placement, disturbance, true, at_once);
  ASSERT_EQ(plain.contents.size(), guessed.contents.size());
  EXPECT_EQ(std::memcmp(plain.contents.data(), guessed.contents.data(), plain.contents.size() * 4), 0);
  EXPECT_EQ(plain.stats.guesses_taken + plain.stats.guesses_dropped, 0);
  EXPECT_EQ(plain.stats.updates, guessed.stats.updates);
  if (!at_once) {
    EXPECT_GT(guessed.stats.guesses_taken, 0);
    EXPECT_EQ(guessed.stats.guesses_dropped > 0, disturbance != Disturbance::none);
  }
  EXPECT_EQ(guessed.stats.store.allocated_bytes, plain.stats.store.allocated_bytes) << "extents leaked";
}

INSTANTIATE_TEST_SUITE_P(
    Speculation, Disturbed,
    ::testing::Combine(::testing::Values(Placement::host, Placement::half, Placement::nvme),
                       ::testing::Values(Disturbance::none, Disturbance::second_backward,
                                         Disturbance::other_rate, Disturbance::cleared,
                                         Disturbance::looked_at, Disturbance::synchronized,
                                         Disturbance::not_finite, Disturbance::weight_overwritten),
                       ::testing::Bool()));

TEST(Speculation, PausesAfterMissesForLongerEachTime) {
  const Trained often = run(Placement::nvme, Disturbance::none, true, false, 1e-3);
  EXPECT_EQ(often.stats.guesses_taken, 0);
  // Steps 1 and 3 are guessed; 2 and 4 are pauses; 0 has nothing to go by.
  const Trained never = run(Placement::nvme, Disturbance::none, true, false);
  EXPECT_EQ(2 * often.stats.guesses_dropped, never.stats.guesses_taken);
}

TEST(Speculation, ReadsAheadWhatIsGuessedFirstBeforeItsGradientComes) {
  Config config = config_of(Placement::nvme, true);
  Engine engine(toy_units(), config, resources_of(config));
  toy_load(engine);
  const int32_t last = engine.layout().units[kUnits - 1].first_chunk;  // the first of backward
  const auto forward = [&] {
    engine.begin_pass({true, true});
    for (int32_t u = 0; u < kUnits; ++u) engine.acquire(u);
  };
  for (int step = 0; step < 3; ++step) {
    forward();
    engine.expect_step(groups_of(step));
    give_gradients(engine, step);
    let_guesses_end(engine);
    engine.step(groups_of(step));
  }
  engine.synchronize();  // nothing is staged
  engine.record_journal(true);
  forward();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::vector<int32_t> staged;
  while (staged.empty() && std::chrono::steady_clock::now() < give_up) {
    for (const engine::JournalEntry& entry : engine.take_journal()) {
      if (entry.happening == engine::Happening::reading) staged.push_back(entry.chunk);
    }
  }
  ASSERT_FALSE(staged.empty()) << "forward leaves the disk idle";
  EXPECT_EQ(staged.front(), last);
}

/// A worker whose updates can be held back.
class HeldExecutor final : public optim::Executor {
 public:
  explicit HeldExecutor(int threads = 1) : worker_(optim::make_thread_executor(threads)) {}
  ~HeldExecutor() override {  // as every executor: what was submitted is run
    const optim::FloatingPointMode mode;
    for (const auto& task : waiting_) task();
  }
  int threads() const override { return worker_->threads(); }
  void submit(std::function<void()> task) override {
    const std::lock_guard lock(mutex_);
    if (held_) {
      waiting_.push_back(std::move(task));
    } else {
      worker_->submit(std::move(task));
    }
  }
  void parallel_for(int64_t count, const std::function<void(int64_t)>& body) override {
    worker_->parallel_for(count, body);
  }
  void hold() {
    const std::lock_guard lock(mutex_);
    held_ = true;
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    for (auto& task : waiting_) worker_->submit(std::move(task));
    waiting_.clear();
  }
  void let_one_go() {
    const std::lock_guard lock(mutex_);
    worker_->submit(std::move(waiting_.front()));
    waiting_.erase(waiting_.begin());
  }

 private:
  std::mutex mutex_;
  bool held_ = false;
  std::vector<std::function<void()>> waiting_;
  std::unique_ptr<optim::Executor> worker_;
};

/// step() decides while guesses are being made: they are dropped by whoever makes them, or taken.
TEST(Speculation, MayBeUnderWayWhenTheStepDecides) {
  for (Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
    for (bool right : {false, true}) {
      std::vector<float> contents[2];
      for (bool speculate : {false, true}) {
        const Config config = config_of(placement, speculate);
        engine::Resources resources = resources_of(config);
        auto executor = std::make_unique<HeldExecutor>(32);  // all guesses are under way at once
        HeldExecutor& worker = *executor;
        resources.executor = std::move(executor);
        Engine engine(toy_units(), config, std::move(resources));
        toy_load(engine);
        for (int step = 0; step < 3; ++step) {
          engine.begin_pass({true, true});
          for (int32_t u = 0; u < kUnits; ++u) engine.acquire(u);
          auto groups = groups_of(step);
          engine.expect_step(groups);
          if (step == 2) worker.hold();
          give_gradients(engine, step);
          if (step < 2) let_guesses_end(engine);
          if (step == 2 && !right) std::get<optim::AdamConfig>(groups[0]).lr *= 0.5;
          const engine::Stats before = engine.stats();
          engine.step(groups);
          const engine::Stats after = engine.stats();
          if (step == 2 && speculate && right) {
            EXPECT_GT(after.guesses_taken, before.guesses_taken);
          }
          if (step == 2 && speculate && !right) {
            EXPECT_GT(after.guesses_dropped, before.guesses_dropped);
          }
        }
        worker.let_go();
        contents[speculate ? 1 : 0] = toy_contents(engine);
      }
      EXPECT_EQ(std::memcmp(contents[0].data(), contents[1].data(), contents[0].size() * 4), 0)
          << placement_name(placement) << (right ? ", right" : ", wrong");
    }
  }
}

/// step() has taken guesses that are still being made, then the store refuses one of them its room. The
/// others end within close(), which has no workers any more for what would follow.
TEST(Speculation, EndsGuessesUnderWayInTheCloseOfAFailedEngine) {
  const Config config = config_of(Placement::half, true);
  engine::Resources resources = resources_of(config);
  auto executor = std::make_unique<HeldExecutor>(32);
  HeldExecutor& worker = *executor;
  resources.executor = std::move(executor);
  std::atomic<bool> refuses = false;
  resources.store = std::make_unique<WatchedAllocations>(std::move(resources.store), [&] {
    if (refuses.exchange(false)) throw io::StoreError({.kind = io::ErrorKind::device, .path = "played"});
  });
  Engine engine(toy_units(), config, std::move(resources));
  toy_load(engine);
  for (int step = 0; step < 3; ++step) {
    engine.begin_pass({true, true});
    for (int32_t u = 0; u < kUnits; ++u) engine.acquire(u);
    engine.expect_step(groups_of(step));
    if (step == 2) worker.hold();
    give_gradients(engine, step);
    if (step < 2) let_guesses_end(engine);
    const int64_t taken = engine.stats().guesses_taken;
    engine.step(groups_of(step));
    if (step == 2) {
      ASSERT_GT(engine.stats().guesses_taken, taken + 1) << "none is under way beside the refused one";
    }
  }
  refuses = true;
  worker.let_one_go();
  EXPECT_THROW(engine.synchronize(), engine::EngineFailed);
  engine.close();
  EXPECT_THROW(engine.synchronize(), std::invalid_argument);
}

/// Gradients of a loss times a power of two, which bf16 and fp32 hold as exactly.
TEST(Speculation, ALossScaleChangesNoBitAndCostsNoGuess) {
  for (const auto& [placement, max_norm] :
       {std::pair{Placement::nvme, 0.0}, {Placement::nvme, 0.25}, {Placement::host, 0.0}}) {
    std::vector<float> contents[2];
    engine::StepResult results[2];
    int64_t taken[2] = {};
    for (const bool scaled : {false, true}) {
      Config config = config_of(placement, true);
      config.max_grad_norm = max_norm;
      Engine engine(toy_units(), config, resources_of(config));
      toy_load(engine);
      for (int step = 0; step < 4; ++step) {
        const float scale = scaled ? std::ldexp(1.0F, 9 + step % 2) : 1;
        engine.set_loss_scale(scale);
        engine.begin_pass({true, true});
        for (int32_t u = 0; u < kUnits; ++u) engine.acquire(u);
        engine.expect_step(groups_of(step));
        give_gradients(engine, step, scale);
        let_guesses_end(engine);
        if (step == 2) engine.clip_grad_norm(engine.grad_norm() / 2);
        results[scaled ? 1 : 0] = engine.step(groups_of(step));
      }
      contents[scaled ? 1 : 0] = toy_contents(engine);
      taken[scaled ? 1 : 0] = engine.stats().guesses_taken;
    }
    EXPECT_EQ(contents[0], contents[1]);
    EXPECT_EQ(results[0].norm, results[1].norm);
    EXPECT_EQ(results[0].clip, results[1].clip);
    EXPECT_EQ(taken[0] > 0, max_norm == 0);
    EXPECT_EQ(taken[0], taken[1]);
  }
}

TEST(Speculation, ALossScaleIsPositiveAndFinite) {
  const Config config = config_of(Placement::host, false);
  Engine engine(toy_units(), config, resources_of(config));
  for (const double scale : {0.0, -1.0, std::nan(""), HUGE_VAL, 1e-310}) {
    EXPECT_THROW(engine.set_loss_scale(scale), std::invalid_argument) << scale;
  }
}

/// Scales lie behind a whole chunk's codes; rounding is stochastic.
TEST(Speculation, TakesWhatIsHeldTwiceInEveryFormat) {
  for (const optim::Format format : {optim::Format::fp32, optim::Format::compact, optim::Format::eight_bit}) {
    const ToyKind kind{{}, format};
    std::vector<float> contents[2];
    for (bool speculate : {false, true}) {
      const Config config = config_of(Placement::host, speculate);
      Engine engine(toy_units(kind), config, resources_of(config, kind));
      toy_load(engine);
      for (int step = 0; step < 4; ++step) {
        engine.begin_pass({true, true});
        for (int32_t u = 0; u < kUnits; ++u) engine.acquire(u);
        engine.expect_step(groups_of(step));
        give_gradients(engine, step);
        let_guesses_end(engine);
        engine.step(groups_of(step));
      }
      contents[speculate ? 1 : 0] = toy_contents(engine);
      EXPECT_EQ(engine.stats().guesses_taken > 0, speculate);
    }
    EXPECT_EQ(std::memcmp(contents[0].data(), contents[1].data(), contents[0].size() * 4), 0)
        << optim::name(format);
  }
}

TEST(Speculation, HoldsTheFirstUnitsOfTheHostTwiceAsFarAsTheBudgetGoes) {
  Config config = config_of(Placement::host, true);
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  const engine::DeviceTraits device{.shares_host_memory = false};
  const engine::Plan all = engine::make_plan(layout, config, device);
  EXPECT_EQ(all.held_twice_bytes,
            all.states_host_bytes + all.weights_host_bytes - layout.units[3].shard_bytes())
      << "all but the frozen one";
  EXPECT_EQ(engine::make_plan(layout, config, {}).held_twice_bytes, 0) << "the CPU computes";
  config.host_budget_bytes = all.host_bytes() - all.held_twice_bytes / 2;
  const engine::Plan some = engine::make_plan(layout, config, device);
  EXPECT_LE(some.host_bytes(), config.host_budget_bytes);
  EXPECT_TRUE(some.held_twice.front());
  EXPECT_FALSE(some.held_twice.back());
  EXPECT_NE(some.text().find("second versions"), std::string::npos);
  config.speculate = false;
  EXPECT_EQ(engine::make_plan(layout, config, device).held_twice_bytes, 0);
}

TEST(Speculation, TheLatestGradientIsGuessedFirst) {
  Config config = config_of(Placement::nvme, true);
  config.chunk_elements = 1024;
  engine::Resources resources = resources_of(config);
  auto executor = std::make_unique<HeldExecutor>();
  HeldExecutor& worker = *executor;
  resources.executor = std::move(executor);
  Engine engine(toy_units(), config, std::move(resources));
  toy_load(engine);
  for (int step = 0; step < 3; ++step) {
    engine.begin_pass({true, true});
    for (int32_t u = 0; u < kUnits; ++u) engine.acquire(u);
    engine.expect_step(groups_of(step));
    if (step == 2) worker.hold();  // the ring fills up, and no slot is given back
    give_gradients(engine, step);
    if (step < 2) {
      let_guesses_end(engine);
      engine.step(groups_of(step));
    }
  }
  engine.record_journal(true);
  worker.let_go();
  let_guesses_end(engine);
  std::vector<int32_t> units;
  for (const engine::JournalEntry& entry : engine.take_journal()) {
    if (entry.happening == engine::Happening::reading) units.push_back(entry.unit);
  }
  ASSERT_GT(units.size(), 2);
  EXPECT_LT(units.front(), units.back());
  EXPECT_TRUE(std::is_sorted(units.begin(), units.end()));
}

TEST(Speculation, GuessesAsManyAsThereIsRoomFor) {
  Config config = config_of(Placement::half, true);
  config.host_budget_bytes = 64 << 20;
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  const engine::Plan roomy = engine::make_plan(layout, config, {});
  EXPECT_GT(roomy.second_weights, 1);
  Config without = config;
  without.speculate = false;
  const engine::Plan none = engine::make_plan(layout, without, {});
  EXPECT_EQ(none.second_weights, 0);
  EXPECT_GT(roomy.nvme_reserve_bytes, none.nvme_reserve_bytes);
  config.host_budget_bytes = roomy.host_bytes() - 6 * roomy.ring_slot_bytes -
                             (roomy.second_weights - 1) * roomy.second_weights_bytes;
  const engine::Plan tight = engine::make_plan(layout, config, {});
  EXPECT_LE(tight.host_bytes(), config.host_budget_bytes);
  EXPECT_LT(tight.second_weights, roomy.second_weights);
}

}  // namespace
}  // namespace overspill::testing
