// A framework that computes on a queue of its own, ahead of the device, as PyTorch does on a CUDA stream:
// leases end, and gradients are handed over, long before the work that uses them is done. Whatever is not
// waited for reads as poison, or as another unit's weights. Here are the bits of weights and moments;
// device_queue_test.cc has the leases, device_gradient_test.cc the gradients, device_trace_test.cc the trace.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/collectives/in_process.h"
#include "engine/resources.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/simulated_device.h"
#include "tests/engine/device_case.h"
#include "tests/engine/framework.h"
#include "tests/engine/rank_world.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"
#include "tests/watched.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Placement;

constexpr int kDeviceSteps = kWatched ? 5 : 10;
constexpr int64_t kSomeLiveThere = 400 << 10;

std::string name_of(const DeviceCase& c) {
  return fmt::format("{}_{}_micro{}{}{}{}", placement_name(c.placement), c.device, c.micro_batches,
                     c.poison ? "_poison" : "",
                     c.device_budget_bytes > kSomeLiveThere ? "_roomy"
                     : c.device_budget_bytes > kThreeUnits  ? "_some"
                                                            : "",
                     c.speculate ? "_speculate" : "");
}

class DeviceCompute : public ::testing::TestWithParam<DeviceCase> {};

TEST_P(DeviceCompute, EqualsTheScalarReference) {
  const DeviceCase& c = GetParam();
  if (c.device == "cuda") {
    if (const std::string why = kernels::why_no_cuda(); !why.empty()) GTEST_SKIP() << why;
  }
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine(c, device);
  std::shared_ptr<kernels::Device> plain_device;
  DeviceCase plain = c;
  plain.device = "host";
  plain.device_budget_bytes = 0;
  if (c.placement == Placement::device) plain.placement = Placement::host;
  const auto host = device_engine(plain, plain_device);
  if (c.device_budget_bytes == kSomeLiveThere) {
    const auto living = engine->plan().units_on_device();
    ASSERT_TRUE(living > 0 && living < 4) << living << " units live on the device";
  }
  Framework framework(*device);
  std::vector<engine::StepResult> results;
  for (int step = 0; step < kDeviceSteps; ++step) {
    const ToyStep taken = framework.step(*engine, step, c.micro_batches);
    const ToyStep expected = toy_step(*host, step, c.micro_batches, 0);
    EXPECT_EQ(taken.loss, expected.loss) << "step " << step;
    EXPECT_EQ(taken.result.norm, expected.result.norm) << "step " << step;
    results.push_back(taken.result);
  }
  expect_same_bits(toy_contents(*engine), toy_reference(kDeviceSteps, c.micro_batches, results), name_of(c));
  if (auto* simulated = dynamic_cast<kernels::SimulatedDevice*>(device.get()))
    simulated->verify_freed_memory();
}

std::vector<DeviceCase> cases() {
  std::vector<DeviceCase> all;
  for (const char* device : {"simulated", "cuda"}) {
    for (Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
      for (int micro_batches : {1, 3}) {
        all.push_back({placement, device, micro_batches, false});
        all.push_back({placement, device, micro_batches, true});
      }
    }
    all.push_back({Placement::host, device, 1, false, 64 << 20});
    all.push_back({Placement::nvme, device, 1, true, 64 << 20});
    for (int micro_batches : {1, 3}) {
      for (bool poison : {false, true}) {
        all.push_back({Placement::device, device, micro_batches, poison, 64 << 20});
        all.push_back({Placement::device, device, micro_batches, poison, kSomeLiveThere});
      }
    }
    all.push_back({Placement::automatic, device, 1, false, kSomeLiveThere});
    all.push_back({Placement::automatic, device, 1, false, kSomeLiveThere, true});
    all.push_back({Placement::host, device, 3, false, kThreeUnits, true});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Queues, DeviceCompute, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

/// Budgets that cut a model anywhere: units on the device, held twice, at home and on NVMe, side by side.
class DrawnBudgets : public ::testing::TestWithParam<int> {};

TEST_P(DrawnBudgets, EqualTheScalarReference) {
  std::minstd_rand random(static_cast<uint32_t>(GetParam()));
  const auto draw = [&](int64_t from, int64_t to) {
    return from + static_cast<int64_t>(random()) % (to - from + 1);
  };
  DeviceCase c{.placement = Placement::automatic};
  c.micro_batches = static_cast<int>(draw(1, 3));
  c.speculate = draw(0, 2) > 0;
  c.poison = draw(0, 1) > 0;
  Config config = device_config(c);
  config.prefetch_units = draw(0, 4);
  config.threads = static_cast<int>(draw(1, 3));
  config.chunk_elements = draw(0, 1) > 0 ? 2048 : 8192;
  const bool wrong = draw(0, 2) == 0;  // guesses are
  if (wrong) config.max_grad_norm = 1;
  config.device_budget_bytes = draw(kThreeUnits, 700 << 10);
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  const engine::DeviceTraits device{.shares_host_memory = false, .updates = kernels::all_formats()};
  Config all_on_nvme = config;
  all_on_nvme.placement = Placement::nvme;
  Config all_at_home = config;
  all_at_home.speculate = false;
  const int64_t least = make_plan(layout, all_on_nvme, device).host_bytes();
  const int64_t enough = make_plan(layout, all_at_home, device).host_bytes();
  config.host_budget_bytes =
      draw(0, 1) > 0 ? draw(std::min(least, enough), enough) : draw(enough, 3 * enough);
  engine::ResourceOptions options;
  options.device = "simulated";
  options.io_backend = "memory";
  options.seed = static_cast<uint64_t>(GetParam());
  engine::Resources resources = make_resources(toy_units(), config, options);
  const std::shared_ptr<kernels::Device> simulated = resources.device;
  Engine engine(toy_units(), config, std::move(resources));
  const engine::Plan& plan = engine.plan();
  SCOPED_TRACE(fmt::format("{} units on the device, {} bytes held twice, {} on NVMe; guesses {}, {} threads",
                           plan.units_on_device(), plan.held_twice_bytes, plan.nvme_bytes(),
                           c.speculate ? (wrong ? "wrong" : "right") : "none", config.threads));
  toy_load(engine);
  Framework framework(*simulated);
  std::vector<engine::StepResult> results;
  for (int step = 0; step < kDeviceSteps; ++step)
    results.push_back(framework.step(engine, step, c.micro_batches).result);
  expect_same_bits(toy_contents(engine), toy_reference(kDeviceSteps, c.micro_batches, results),
                   fmt::format("seed {}", GetParam()));
  dynamic_cast<kernels::SimulatedDevice&>(*simulated).verify_freed_memory();
}

INSTANTIATE_TEST_SUITE_P(Seeds, DrawnBudgets, ::testing::Range(1, kWatched ? 9 : 33));

// ---- several ranks

/// Whether shards and gradients meet on the device or on the host.
class TwoRanks : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Meeting, TwoRanks, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "on_the_device" : "on_the_host"; });

TEST_P(TwoRanks, EqualTheReferenceAtEveryStage) {
  for (int stage : {0, 1, 2, 3}) {
    for (int micro_batches : {1, 2}) {
      std::vector<engine::StepResult> results;
      std::vector<float> contents;
      const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
        RankOptions options;
        options.stage = stage;
        options.given_device = kernels::make_simulated_device();
        options.micro_batches = micro_batches;
        options.reaches = GetParam();
        const auto engine = toy_rank(options, std::move(ranks));
        EXPECT_EQ(engine->plan().sums_device_bytes > 0, GetParam() && stage >= 2 && micro_batches == 1);
        toy_load(*engine);
        Framework framework(*options.given_device);
        std::vector<engine::StepResult> own;
        for (int step = 0; step < kDeviceSteps; ++step)
          own.push_back(framework.step(*engine, step, micro_batches, rank).result);
        const auto all = toy_contents(*engine);
        if (rank == 0) {
          results = own;
          contents = all;
        }
      });
      EXPECT_EQ(errors, std::vector<std::string>(2));
      expect_same_bits(contents, toy_reference(kDeviceSteps, micro_batches, results, 2),
                       fmt::format("stage {}, {} micro-batches", stage, micro_batches));
    }
  }
}

}  // namespace
}  // namespace overspill::testing
