// Gradients on NVMe between backward and the update: what is moved, what is seen from outside, what a failing
// disk does. That they never change a bit is in exactness_test.cc and in the simulation.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "cpu_optim/optimizer.h"
#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "io/memory_store.h"
#include "tests/engine/around_store.h"
#include "tests/engine/kernel_count.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Placement;

Config config_of(Placement placement, int64_t micro_batches = 1) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {std::filesystem::temp_directory_path()};
  config.job = fmt::format("gradients-{}", ::getpid());
  config.threads = 2;
  config.chunk_elements = 2048;
  config.gradient_accumulation = micro_batches;
  config.max_grad_norm = 1.0;
  config.placement = placement;
  config.poison = true;
  return config;
}

/// With the smallest budget that this placement takes: two buffers of staging, two slots in the ring.
Config smallest(Config config, const std::vector<engine::UnitSpec>& units) {
  const engine::Layout layout = engine::make_layout(units, config.chunk_elements, 0, 1);
  for (config.host_budget_bytes = 64 << 10;; config.host_budget_bytes += 4 << 10) {
    try {
      make_plan(layout, config, {true});
      return config;
    } catch (const engine::BudgetError&) {
    }
  }
}

engine::Resources in_memory(const std::vector<engine::UnitSpec>& units, const Config& config,
                            const io::Faults& faults = {.seed = 3}) {
  engine::Resources resources = make_resources(units, config, {"host", "memory", 1});
  if (resources.store != nullptr) resources.store = io::make_memory_store(64 << 20, faults, 65536);
  return resources;
}

std::vector<float> gradient_of(Engine& engine, int unit, int segment) {
  std::vector<float> out(static_cast<size_t>(engine.layout().units[unit].segments[segment].elements));
  engine.read_state(unit, segment, "grad", out);
  return out;
}

// ---- looks from outside

class Looked : public ::testing::TestWithParam<int64_t> {};

TEST_P(Looked, FromOutsideTheyAreWhatTheyAreInMemory) {
  const int64_t micro_batches = GetParam();
  const Config spilled_config = smallest(config_of(Placement::nvme, micro_batches), toy_units());
  const Config host_config = config_of(Placement::host, micro_batches);
  Engine spilled(toy_units(), spilled_config, in_memory(toy_units(), spilled_config));
  Engine host(toy_units(), host_config, in_memory(toy_units(), host_config));
  EXPECT_EQ(spilled.plan().staging_buffers, 2);
  EXPECT_EQ(spilled.plan().gradients_host_bytes, 0);
  EXPECT_EQ(host.plan().gradients_nvme_bytes, 0);
  for (Engine* engine : {&spilled, &host}) toy_load(*engine);
  for (int step = 0; step < 6; ++step) {
    const bool again = step == 2;      // a backward that is thrown away first
    const bool clips = step % 2 == 1;  // once, to another norm
    const bool twice = step == 4;      // more than was announced
    std::vector<double> norms;
    std::vector<std::vector<float>> gradients[2];
    int which = 0;
    for (Engine* engine : {&spilled, &host}) {
      for (int micro = 0; micro < micro_batches + (again ? 1 : 0) + (twice ? 1 : 0); ++micro) {
        if (again && micro == 1) engine->clear_gradients();
        engine->begin_pass({true, true});
        for (int u = 5; u >= 0; --u) toy_backward(*engine, engine->acquire(u), u, step, micro, 0);
        norms.push_back(engine->grad_norm());
        for (int u = 0; u < 6; ++u) {
          for (size_t s = 0; s < engine->layout().units[u].segments.size(); ++s) {
            const auto segment = static_cast<int>(s);
            if (engine->has_gradient(u, segment))
              gradients[which].push_back(gradient_of(*engine, u, segment));
          }
        }
      }
      if (clips) norms.push_back(engine->clip_grad_norm(0.25));
      const engine::StepResult result = engine->step(toy_groups(step));
      EXPECT_LT(result.clip, 1.0) << "clipping must be active";
      norms.push_back(result.norm);
      norms.push_back(result.clip);
      EXPECT_FALSE(engine->has_gradient(0, 0));
      ++which;
    }
    EXPECT_EQ(gradients[0], gradients[1]) << "step " << step;
    const auto half = static_cast<std::ptrdiff_t>(norms.size() / 2);
    EXPECT_TRUE(std::equal(norms.begin(), norms.begin() + half, norms.begin() + half)) << "step " << step;
  }
  EXPECT_EQ(toy_contents(spilled), toy_contents(host));
  spilled.clear_gradients();  // until then they can be used again
  EXPECT_EQ(spilled.stats().store.allocated_bytes, spilled.plan().kept_nvme_bytes()) << "extents leaked";
  EXPECT_LE(spilled.stats().host_peak_bytes, spilled_config.host_budget_bytes);
}

INSTANTIATE_TEST_SUITE_P(MicroBatches, Looked, ::testing::Values(1, 2, 4));

// ---- steps that change nothing, disks that fail

TEST(SpilledGradients, OfASkippedStepAreGone) {
  const Config config = config_of(Placement::nvme);
  Engine engine(toy_units(), config, in_memory(toy_units(), config));
  toy_load(engine);
  toy_step(engine, 0, 1, 0);
  const std::vector<float> before = toy_contents(engine);
  std::vector<float> bad(5000, 1.0F);
  bad[4321] = std::numeric_limits<float>::quiet_NaN();
  engine.begin_pass({true, true});
  engine.add_gradient(5, 0, std::as_bytes(std::span(bad)), "F32");
  EXPECT_TRUE(std::isnan(engine.grad_norm()));
  EXPECT_TRUE(engine.step(toy_groups(1)).skipped);
  EXPECT_EQ(toy_contents(engine), before);
  engine.clear_gradients();
  EXPECT_EQ(engine.stats().store.allocated_bytes, engine.plan().kept_nvme_bytes()) << "extents leaked";
  std::vector<float> good(5000, 1.0F);
  engine.add_gradient(5, 0, std::as_bytes(std::span(good)), "F32");
  EXPECT_EQ(engine.grad_norm(), std::sqrt(5000.0)) << "something was left of the NaN";
}

TEST(SpilledGradients, ThatCannotBeWrittenFailTheEngine) {
  // Only gradients are on NVMe: what fails is theirs.
  const std::vector<engine::UnitSpec> units = {
      {"u", optim::Format::exact, "BF16", {{"w", {64, 1024}, 0, {}}}}};
  for (const bool reads : {true, false}) {
    io::Faults faults{.seed = 4};
    (reads ? faults.read_error : faults.write_error) = 0.1;
    Config config = config_of(Placement::nvme, 2);
    Engine engine(units, config, in_memory(units, config, faults));
    const std::vector<uint16_t> ones(65536, 0x3F80);
    std::string message;
    try {
      for (int i = 0; i < 100; ++i) engine.add_gradient(0, 0, std::as_bytes(std::span(ones)), "BF16");
    } catch (const engine::EngineFailed& error) {
      message = error.what();
    }
    for (const char* part : {"gradients of u", "Input/output error", "memory at offset", "checkpoint"})
      EXPECT_NE(message.find(part), std::string::npos) << part << " is missing in: " << message;
    EXPECT_THROW(engine.step(toy_groups(0)), engine::EngineFailed);
    EXPECT_THROW(engine.acquire(0), engine::EngineFailed);
  }
}

TEST(SpilledGradients, OfSeveralThreadsWaitForEachOther) {
  const Config config = smallest(config_of(Placement::nvme, 2), toy_units());
  const Config host_config = config_of(Placement::host, 2);
  Engine spilled(toy_units(), config,
                 in_memory(toy_units(), config, {.seed = 5, .delay_max = std::chrono::microseconds(100)}));
  Engine host(toy_units(), host_config, in_memory(toy_units(), host_config));
  for (Engine* engine : {&spilled, &host}) {
    toy_load(*engine);
    for (int step = 0; step < 5; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        engine->begin_pass({true, true});
        std::vector<std::thread> threads;
        for (int u : {0, 1, 2, 4, 5}) {
          threads.emplace_back([&, u] {
            const engine::Unit& unit = engine->layout().units[u];
            for (int s = 0; s < static_cast<int>(unit.segments.size()); ++s) {
              const std::vector<float> seen(static_cast<size_t>(unit.segments[s].elements), 0.5F);
              toy_add_gradient(*engine, seen, u, s, step, micro, 0);
            }
          });
        }
        for (std::thread& thread : threads) thread.join();
      }
      engine->step(toy_groups(step));
    }
  }
  EXPECT_EQ(toy_contents(spilled), toy_contents(host));
}

// ---- a disk that has no room for a moment

/// Ends a test that hangs.
class HangLimit {
 public:
  HangLimit() { ::alarm(60); }
  ~HangLimit() { ::alarm(0); }
  HangLimit(const HangLimit&) = delete;
  HangLimit& operator=(const HangLimit&) = delete;
};

/// An engine with two buffers of staging, whose store refuses allocations while `full`.
class FullForAMoment : public ::testing::Test {
 protected:
  FullForAMoment() : config_(smallest(config_of(Placement::nvme, 2), toy_units())) {
    engine::Resources resources = in_memory(toy_units(), config_);
    resources.store = std::make_unique<WatchedAllocations>(std::move(resources.store), [this] {
      if (!full_) return;
      throw io::StoreError(
          {.kind = io::ErrorKind::no_space, .operation = io::Operation::reserve, .path = "the test's disk"});
    });
    full_engine_.emplace(toy_units(), config_, std::move(resources));
    plain_engine_.emplace(toy_units(), config_, in_memory(toy_units(), config_));
    for (Engine* engine : {&*full_engine_, &*plain_engine_}) {
      toy_load(*engine);
      toy_step(*engine, 0, 2, 0);
      engine->synchronize();
    }
  }

  /// Of a small segment, which has less than the whole of its chunk: more of it is expected, so it waits in
  /// memory.
  static void add(Engine& engine, int unit) {
    const std::vector<float> seen(static_cast<size_t>(engine.layout().units[unit].segments[1].elements),
                                  0.5F);
    toy_add_gradient_always(engine, seen, unit, 1, 1, 0, 0);
  }

  const HangLimit limit_;
  const Config config_;
  std::atomic<bool> full_ = false;
  std::optional<Engine> full_engine_;
  std::optional<Engine> plain_engine_;
};

TEST_F(FullForAMoment, AStepThatWasRefusedCanBeTakenAgain) {
  Engine& engine = *full_engine_;
  for (Engine* each : {&engine, &*plain_engine_}) add(*each, 1);
  full_ = true;
  EXPECT_THROW(engine.step(toy_groups(1)), io::StoreError);
  EXPECT_THROW(engine.step(toy_groups(1)), io::StoreError) << "it is full yet";
  full_ = false;
  EXPECT_EQ(engine.step(toy_groups(1)).norm, plain_engine_->step(toy_groups(1)).norm);
  for (Engine* each : {&engine, &*plain_engine_}) toy_step(*each, 2, 2, 0);
  EXPECT_EQ(toy_contents(engine), toy_contents(*plain_engine_));
  engine.clear_gradients();
  EXPECT_EQ(engine.stats().store.allocated_bytes, engine.plan().kept_nvme_bytes()) << "extents leaked";
}

TEST_F(FullForAMoment, GradientsOfARefusedStepCanBeThrownAway) {
  Engine& engine = *full_engine_;
  add(engine, 1);
  full_ = true;
  EXPECT_THROW(engine.step(toy_groups(1)), io::StoreError);
  engine.clear_gradients();
  full_ = false;
  for (Engine* each : {&engine, &*plain_engine_}) toy_step(*each, 1, 2, 0);
  EXPECT_EQ(toy_contents(engine), toy_contents(*plain_engine_));
  engine.clear_gradients();
  EXPECT_EQ(engine.stats().store.allocated_bytes, engine.plan().kept_nvme_bytes()) << "extents leaked";
}

TEST_F(FullForAMoment, ACheckpointCanBeLoadedAfterARefusedStep) {
  Engine& engine = *full_engine_;
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("overspill-refused-{}", ::getpid());
  engine.save(folder, "{}");
  add(engine, 1);
  full_ = true;
  EXPECT_THROW(engine.step(toy_groups(1)), io::StoreError);
  full_ = false;
  engine.load(folder);
  EXPECT_FALSE(engine.has_gradient(1, 1));
  EXPECT_EQ(toy_contents(engine), toy_contents(*plain_engine_));
  for (Engine* each : {&engine, &*plain_engine_}) toy_step(*each, 1, 2, 0);
  EXPECT_EQ(toy_contents(engine), toy_contents(*plain_engine_));
  std::filesystem::remove_all(folder);
}

TEST_F(FullForAMoment, ALookThatWasRefusedCanBeTakenAgain) {
  Engine& engine = *full_engine_;
  for (int unit : {0, 1, 4}) add(engine, unit);  // of three chunks, two in memory
  std::vector<float> expected;
  for (int unit : {0, 1, 4}) {
    add(*plain_engine_, unit);
    const std::vector<float> own = gradient_of(*plain_engine_, unit, 1);
    expected.insert(expected.end(), own.begin(), own.end());
  }
  full_ = true;
  EXPECT_THROW(gradient_of(engine, 0, 1), io::StoreError) << "one of the two has to make room";
  full_ = false;
  std::vector<float> seen;
  for (int unit : {0, 1, 4}) {
    const std::vector<float> own = gradient_of(engine, unit, 1);
    seen.insert(seen.end(), own.begin(), own.end());
  }
  EXPECT_EQ(seen, expected);
}

TEST_F(FullForAMoment, AGradientThatWasRefusedFailsTheEngineByName) {
  Engine& engine = *full_engine_;
  for (int unit : {0, 1}) add(engine, unit);
  full_ = true;
  std::string message;
  try {
    add(engine, 4);
  } catch (const engine::EngineFailed& error) {
    message = error.what();
  }
  for (const char* part : {"gradients of block1", "the test's disk"})
    EXPECT_NE(message.find(part), std::string::npos) << part << " is missing in: " << message;
  full_ = false;
  EXPECT_THROW(engine.step(toy_groups(1)), engine::EngineFailed);
}

// ---- the plan

TEST(SpilledGradients, ComeHomeBeforeStatesAndAfterWeights) {
  std::vector<engine::UnitSpec> units;
  for (int i = 0; i < 16; ++i) {
    units.push_back({fmt::format("block{}", i),
                     optim::Format::exact,
                     "BF16",
                     {{fmt::format("w{}", i), {1 << 18}, 0, {}}}});
  }
  Config config = config_of(Placement::automatic);
  config.chunk_elements = 1 << 16;
  const engine::Layout layout = engine::make_layout(units, config.chunk_elements, 0, 1);
  const auto left = [](const std::vector<bool>& on_nvme) {
    return std::count(on_nvme.begin(), on_nvme.end(), true);
  };
  int weights_partly = 0;
  int gradients_partly = 0;
  int states_partly = 0;
  for (config.host_budget_bytes = 1 << 20; config.host_budget_bytes < 80 << 20;
       config.host_budget_bytes += 1 << 18) {
    engine::Plan plan;
    try {
      plan = make_plan(layout, config, {true});
    } catch (const engine::BudgetError&) {
      continue;
    }
    EXPECT_LE(plan.host_bytes(), config.host_budget_bytes);
    const bool gradients_home = left(plan.gradients_on_nvme) < 64;
    const bool states_home = left(plan.states_on_nvme) < 64;
    if (left(plan.weights_on_nvme) > 0) {  // gradients get what is too little for one more unit's weights
      EXPECT_LT(plan.gradients_host_bytes, layout.units[0].bytes()) << plan.text();
    }
    EXPECT_TRUE(!states_home || left(plan.gradients_on_nvme) == 0) << plan.text();
    EXPECT_EQ(plan.staging_buffers > 0, left(plan.gradients_on_nvme) > 0);
    weights_partly += left(plan.weights_on_nvme) > 0 ? 1 : 0;
    gradients_partly += gradients_home && left(plan.gradients_on_nvme) > 0 ? 1 : 0;
    states_partly += states_home && left(plan.states_on_nvme) > 0 ? 1 : 0;
  }
  EXPECT_GT(weights_partly, 0);
  EXPECT_GT(gradients_partly, 0);
  EXPECT_GT(states_partly, 0);
}

// ---- bytes, by the kernel's count

enum class Home : uint8_t { weights_and_gradients, gradients, nothing };
struct TrafficCase {
  Home home;
  int64_t micro_batches;
  double bytes;  // a parameter where forward waits, without weights that further micro-batches read again
};

class Traffic : public ::testing::TestWithParam<TrafficCase> {};

/// 64 units of 32 Ki parameters; of weights the arena keeps 3 units over the turn. A forward that begins
/// while updates run finds the weights of some in memory, up to 2 bytes a parameter; how many, the clock
/// decides.
TEST_P(Traffic, IsWhatTheDesignSaysByTheKernelsCount) {
  const auto& [home, micro_batches, expected] = GetParam();
  constexpr int kUnits = 64;
  constexpr int64_t kElements = 32 * 1024;
  std::vector<engine::UnitSpec> units;
  for (int u = 0; u < kUnits; ++u) {
    units.push_back({fmt::format("u{}", u),
                     optim::Format::exact,
                     "BF16",
                     {{fmt::format("w{}", u), {kElements / 64, 48}, 0, {}},
                      {fmt::format("b{}", u), {kElements / 64, 16}, 0, {}}}});
  }
  Config config = config_of(Placement::nvme, micro_batches);
  config.chunk_elements = 8192;
  config.prefetch_units = 0;
  config.poison = false;
  config.speculate = home == Home::gradients;  // keeps gradients on the host; nothing is guessed here
  if (home == Home::weights_and_gradients) {
    config.placement = Placement::automatic;
    config.host_budget_bytes = int64_t{kUnits} * kElements * 4 + (1 << 20);
  }
  Engine engine(units, config, make_resources(units, config, {}));
  if (engine.stats().store.backend.find("O_DIRECT") == std::string::npos) {
    GTEST_SKIP() << "no O_DIRECT here: the kernel counts the page cache's transfers, not ours";
  }
  int n = 0;
  const auto step = [&, count = micro_batches] {
    for (int micro = 0; micro < static_cast<int>(count); ++micro) {
      engine.begin_pass({true, true});
      for (int u = 0; u < kUnits; ++u) engine.acquire(u);
      for (int u = kUnits - 1; u >= 0; --u) {
        engine.acquire(u);
        for (int s = 1; s >= 0; --s) {
          const auto elements = static_cast<size_t>(engine.layout().units[u].segments[s].elements);
          const std::vector<uint16_t> ones(elements, 0x3F80);
          engine.add_gradient(u, s, std::as_bytes(std::span(ones)), "BF16");
        }
      }
    }
    engine.step(toy_groups(n++));
  };
  const auto transferred = [] { return kernel_count("read_bytes:") + kernel_count("write_bytes:"); };
  const auto moved = [&](int steps, bool forward_waits) {  // until all of it is written
    const int64_t before = transferred();
    for (int i = 0; i < steps; ++i) {
      step();
      if (forward_waits) engine.synchronize();
    }
    engine.synchronize();
    return static_cast<double>(transferred() - before) / (static_cast<double>(kUnits) * kElements * steps);
  };
  moved(3, true);
  const double waited = moved(4, true);
  const double hurried = moved(4, false);
  const bool weights_move = home != Home::weights_and_gradients;
  // Forward and backward of each further micro-batch read hi.
  const double weights_again = weights_move ? 4 * static_cast<double>(micro_batches - 1) : 0;
  fmt::print("{:.2f} bytes a parameter, {:.2f} with forward under updates; {} of them weights read again\n",
             waited, hurried, weights_again);
  EXPECT_NEAR(waited - weights_again, expected, 0.03 * expected) << engine.plan().text();
  EXPECT_LE(hurried - weights_again, 1.03 * expected);
  EXPECT_GE(hurried - weights_again, 0.97 * (expected - (weights_move ? 2 : 0)));
}

INSTANTIATE_TEST_SUITE_P(Cases, Traffic,
                         ::testing::Values(TrafficCase{Home::weights_and_gradients, 1, 20},
                                           TrafficCase{Home::gradients, 1, 28},
                                           TrafficCase{Home::nothing, 1, 32},
                                           TrafficCase{Home::nothing, 2, 40},
                                           TrafficCase{Home::nothing, 4, 56}));

}  // namespace
}  // namespace overspill::testing
