// Simulated steps, beside what can be calculated by hand.
#include "engine/plan/simulate.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "engine/plan/plan.h"
#include "kernels/device_kernels.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Lane;
using engine::Layout;
using engine::Placement;
using engine::Rates;
using engine::SimulatedStep;
using engine::UnitSpec;
using engine::UnitWork;

constexpr int kUnits = 6;
constexpr int64_t kElements = 1 << 20;  // of a unit; a multiple of all paddings here
constexpr double kAll = kUnits * static_cast<double>(kElements);

std::vector<UnitSpec> alike_units() {
  std::vector<UnitSpec> units(kUnits);
  for (int u = 0; u < kUnits; ++u) {
    units[u].name = fmt::format("unit{}", u);
    units[u].segments.resize(1);
    units[u].segments[0].name = fmt::format("w{}", u);
    units[u].segments[0].shape = {1024, 1024};
  }
  return units;
}

Config simulated_config(Placement placement) {
  Config config;
  config.host_budget_bytes = int64_t{1} << 30;
  config.chunk_elements = 1 << 17;
  config.placement = placement;
  config.nvme = {"disk"};
  return config;
}

/// All take a second for all units together: a byte or an element of the disk 1 / (20 N), and so on.
Rates even_rates() {
  Rates rates;
  rates.update_s_per_element = 1 / kAll;
  for (double& speed : rates.bytes_per_s) speed = 20 * kAll;
  return rates;
}

std::vector<UnitWork> even_work(double forward, double backward) {
  return {kUnits, UnitWork{forward / kUnits, backward / kUnits}};
}

SimulatedStep simulated(const Config& config, const std::vector<UnitWork>& work, const Rates& rates,
                        int ranks = 1, bool shares_host_memory = true) {
  const Layout layout = engine::make_layout(alike_units(), config.chunk_elements, 0, ranks, config.stage);
  engine::DeviceTraits device{.shares_host_memory = shares_host_memory};
  return engine::simulate(layout, engine::make_plan(layout, config, device), config, device, work, rates);
}

double simulated_busy(const SimulatedStep& step, Lane lane) {
  return step.busy_s[static_cast<size_t>(lane)];
}
double simulated_bytes(const SimulatedStep& step, Lane lane) {
  return step.bytes[static_cast<size_t>(lane)];
}

TEST(Simulate, OneProcessorDoesOneThingAfterTheOther) {
  const SimulatedStep step = simulated(simulated_config(Placement::host), even_work(2, 4), even_rates());
  EXPECT_NEAR(step.step_s, 2 + 4 + 1, 1e-6);
  EXPECT_EQ(simulated_bytes(step, Lane::read), 0);
}

TEST(Simulate, BesideADeviceForwardHidesUpdatesButTheFirst) {
  Rates rates = even_rates();
  rates.processor[static_cast<size_t>(Lane::compute)] = 0;
  const SimulatedStep step = simulated(simulated_config(Placement::host), even_work(2, 4), rates);
  EXPECT_NEAR(step.step_s, 2 + 4 + 1.0 / kUnits, 1e-6) << "the first unit waits for its own";
  EXPECT_NEAR(step.waited_s, 1.0 / kUnits, 1e-6);
}

TEST(Simulate, ADiskThatIsSlowDecides) {
  const Config config = simulated_config(Placement::nvme);
  Rates rates = even_rates();
  rates.update_s_per_element = 0;
  const SimulatedStep step = simulated(config, even_work(0, 0), rates);
  const double moved = simulated_bytes(step, Lane::read) + simulated_bytes(step, Lane::write);
  const engine::Plan plan =
      engine::make_plan(engine::make_layout(alike_units(), config.chunk_elements, 0, 1), config, {true});
  EXPECT_LE(moved, static_cast<double>(plan.nvme_read_bytes_per_step + plan.nvme_written_bytes_per_step));
  EXPECT_EQ(simulated_bytes(step, Lane::write), 14 * kAll) << "weights and states, and gradients";
  EXPECT_GE(step.step_s, moved / (20 * kAll) - 1e-6) << "no faster than the disk";
  EXPECT_LE(step.step_s, 1.2 * moved / (20 * kAll)) << "reads and writes overlap";
}

TEST(Simulate, WhatIsSpentInBackwardIsHiddenByGuesses) {
  Config config = simulated_config(Placement::nvme);
  Rates rates = even_rates();
  rates.processor[static_cast<size_t>(Lane::compute)] = 0;
  const double without = simulated(config, even_work(1, 3), rates).step_s;
  config.speculate = true;
  const double with = simulated(config, even_work(1, 3), rates).step_s;
  EXPECT_LT(with, without - 0.2);
  EXPECT_GE(with, 4);
}

TEST(Simulate, RanksMoveWhatTheyLack) {
  Config config = simulated_config(Placement::host);
  for (const int ranks : {2, 4}) {
    const SimulatedStep step = simulated(config, even_work(1, 2), even_rates(), ranks);
    const double part = 1 - 1.0 / ranks;
    const double gathered = simulated_bytes(step, Lane::network) - 2 * kAll * part;  // the gradients
    EXPECT_GE(gathered, 2 * kAll * part * 0.99) << "each unit once";
    EXPECT_LE(gathered, 4 * kAll * part * 1.01) << "for forward and for backward";
    EXPECT_NEAR(simulated_busy(step, Lane::update) > 0, true, 0);
  }
  config.stage = 1;
  const SimulatedStep step = simulated(config, even_work(1, 2), even_rates(), 2);
  EXPECT_NEAR(simulated_bytes(step, Lane::network), (2 + 2) * kAll / 2, 1) << "weights once, gradients once";
}

TEST(Simulate, MicroBatchesUpdateOnce) {
  Config config = simulated_config(Placement::host);
  config.gradient_accumulation = 3;
  EXPECT_NEAR(simulated(config, even_work(2, 4), even_rates()).step_s, 3 * 6 + 1, 1e-6);
}

TEST(Simulate, ADeviceGetsWeightsByItsLink) {
  Config config = simulated_config(Placement::host);
  config.device_budget_bytes = int64_t{1} << 30;
  Rates rates = even_rates();
  rates.processor[static_cast<size_t>(Lane::compute)] = 0;
  const SimulatedStep step = simulated(config, even_work(1, 2), rates, 1, false);
  EXPECT_GE(simulated_bytes(step, Lane::up), 2 * kAll) << "each unit once at least";
  EXPECT_LE(simulated_bytes(step, Lane::up), 4 * kAll);
  EXPECT_EQ(simulated_bytes(step, Lane::down), 2 * kAll) << "gradients";
}

TEST(Simulate, RanksThatSumOnTheirDevicesSendTheirPartDown) {
  Config config = simulated_config(Placement::host);
  config.device_budget_bytes = int64_t{1} << 30;
  const Layout layout = engine::make_layout(alike_units(), config.chunk_elements, 0, 4);
  const engine::DeviceTraits device{
      .shares_host_memory = false, .updates = kernels::all_formats(), .gathers = true};
  const engine::Plan plan = engine::make_plan(layout, config, device);
  ASSERT_GT(plan.sums_device_bytes, 0);
  const SimulatedStep step = engine::simulate(layout, plan, config, device, even_work(1, 2), even_rates());
  EXPECT_LE(simulated_bytes(step, Lane::down), 2 * kAll / 4) << "less of those that live there";
  EXPECT_LE(simulated_bytes(step, Lane::up), 4 * kAll / 4) << "shards, which meet there";
}

TEST(Simulate, ATableThatIsLookedUpIsNotReadInBackward) {
  Config config = simulated_config(Placement::nvme);
  // The arena does not keep the unit from forward to backward, and the ring has not read it ahead.
  config.prefetch_units = 1;
  config.chunk_elements = 1 << 15;
  constexpr size_t kTable = 1;
  std::vector<UnitWork> work = even_work(1, 2);
  const double all = simulated_bytes(simulated(config, work, even_rates()), Lane::read);
  work[kTable].in_backward = false;
  const double fewer = simulated_bytes(simulated(config, work, even_rates()), Lane::read);
  EXPECT_NEAR(all - fewer, 2.0 * kElements, 1);
}

/// Compute is so slow that all updates end long before forward gets there. The arena has room for all units.
TEST(Simulate, WeightsComeFromTheUpdateWhereTheArenaHasRoomForThem) {
  Config config = simulated_config(Placement::nvme);
  config.chunk_elements = 1 << 14;  // the ring holds a sixth of the model
  config.prefetch_units = 4;        // so the arena holds them all
  const SimulatedStep step = simulated(config, even_work(100, 200), even_rates());
  const double states_and_weights = simulated_bytes(step, Lane::write);
  EXPECT_NEAR(simulated_bytes(step, Lane::read), states_and_weights, 1);
  config.prefetch_units = 0;  // each use reads its unit
  const SimulatedStep none = simulated(config, even_work(100, 200), even_rates());
  EXPECT_GT(simulated_bytes(none, Lane::read), states_and_weights + 2 * kAll);
}

TEST(Simulate, EachElementIsUpdatedOnceAStepWhereverItLies) {
  for (const Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
    for (const bool speculate : {false, true}) {
      Config config = simulated_config(placement);
      config.speculate = speculate;
      Rates rates = even_rates();
      rates.processor[static_cast<size_t>(Lane::compute)] = 0;
      rates.processor[static_cast<size_t>(Lane::update)] = 0;
      EXPECT_NEAR(simulated_busy(simulated(config, even_work(3, 6), rates), Lane::update), 1, 0.02)
          << static_cast<int>(placement) << speculate;
    }
  }
}

TEST(Simulate, RefusesWhatItCannotKnow) {
  const Config config = simulated_config(Placement::nvme);
  Rates rates = even_rates();
  EXPECT_THROW(simulated(config, {UnitWork{}}, rates), std::invalid_argument);
  rates.use_s = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(simulated(config, even_work(1, 1), rates), std::invalid_argument);
  rates.use_s = -1;
  EXPECT_THROW(simulated(config, even_work(1, 1), rates), std::invalid_argument);
  rates = even_rates();
  rates.processor[static_cast<size_t>(Lane::compute)] = 1e308;
  EXPECT_THROW(simulated(config, even_work(1, 1), rates), std::invalid_argument);
  rates = even_rates();
  rates.bytes_per_s[static_cast<size_t>(Lane::read)] = 1e-310;
  EXPECT_THROW(simulated(config, even_work(1, 1), rates), std::invalid_argument);
  Config long_step = config;
  long_step.gradient_accumulation = 1'000'000'000;
  EXPECT_THROW(simulated(long_step, even_work(1, 1), even_rates()), std::invalid_argument);
  rates = even_rates();
  rates.bytes_per_s[static_cast<size_t>(Lane::write)] = 0;
  EXPECT_THROW(simulated(config, even_work(1, 1), rates), std::invalid_argument);
}

}  // namespace
}  // namespace overspill::testing
