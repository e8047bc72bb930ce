// The prediction of a step: numbers that can be checked by hand.
#include "engine/plan/predict.h"

#include <gtest/gtest.h>

#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::BudgetRow;
using engine::Limit;
using engine::MachineFigures;
using engine::Plan;
using engine::Prediction;
using engine::StepReport;
using engine::UnitDemand;

constexpr int64_t kGB = 1'000'000'000;

/// 1 s of forward, 2 s of backward, 2 GB/s.
MachineFigures figures() {
  return {.steps = 3,
          .forward_s = 1,
          .backward_s = 2,
          .call_s = 0.25,
          .disk_bytes_per_s = 2e9,
          .ring_slots = 2,
          .update_s_per_element = 0,
          .forward_left = {},
          .step_s = 4};
}

/// All that forward needs belongs to one unit, the last that it uses: the bound of DESIGN 5.
Prediction predict(const Plan& plan, const MachineFigures& f, double guessed) {
  const int64_t bytes = plan.nvme_read_bytes_per_step + plan.nvme_written_bytes_per_step;
  const UnitDemand all = {.bytes = bytes - plan.weights_nvme_bytes - plan.gradients_nvme_bytes};
  return engine::predict(plan, std::span(&all, 1), f, guessed);
}

/// States alone on NVMe: `states` bytes each way, through a ring of `ring` bytes.
Plan states_on_nvme(int64_t states, int64_t ring) {
  Plan plan;
  plan.states_nvme_bytes = plan.nvme_read_bytes_per_step = plan.nvme_written_bytes_per_step = states;
  plan.ring_slots = 2;
  plan.ring_slot_bytes = ring / 2;
  return plan;
}

TEST(Predict, TheDiskHasForwardAndTheRing) {
  // 20 GB there and back less 2 GB through the ring are 9 s at 2 GB/s.
  const Prediction p = predict(states_on_nvme(10 * kGB, 1 * kGB), figures(), 0);
  EXPECT_DOUBLE_EQ(p.bound_s, 2 + 9);
  EXPECT_DOUBLE_EQ(p.step_s, 2 + 9 + 0.25);
  EXPECT_DOUBLE_EQ(p.disk_s, 10);
  EXPECT_EQ(p.limit, Limit::disk);
}

TEST(Predict, ComputeHidesAFastDisk) {
  const Prediction p = predict(states_on_nvme(kGB / 2, 0), figures(), 0);  // half a second
  EXPECT_DOUBLE_EQ(p.bound_s, 3);
  EXPECT_DOUBLE_EQ(p.step_s, 3.25);
  EXPECT_EQ(p.limit, Limit::compute);
}

TEST(Predict, ARingLargerThanTheTrafficLeavesCompute) {
  const Prediction p = predict(states_on_nvme(10 * kGB, 20 * kGB), figures(), 0);
  EXPECT_DOUBLE_EQ(p.bound_s, 3);
  EXPECT_EQ(p.limit, Limit::compute);
}

TEST(Predict, WeightsOnNvmeAreReadOnceMoreInBackward) {
  Plan plan = states_on_nvme(10 * kGB, 0);
  plan.weights_nvme_bytes = 6 * kGB;
  plan.nvme_read_bytes_per_step += 12 * kGB;
  plan.nvme_written_bytes_per_step += 6 * kGB;
  const Prediction p = predict(plan, figures(), 0);
  EXPECT_DOUBLE_EQ(p.bound_s, 3 + 16) << "backward reads 6 GB in 3 s, forward moves 32 GB in 16 s";
}

TEST(Predict, GuessedUpdatesMoveUnderBackward) {
  const Plan plan = states_on_nvme(2 * kGB, 0);  // 2 s of disk
  EXPECT_DOUBLE_EQ(predict(plan, figures(), 0).step_s, 2 + 2 + 0.25);
  EXPECT_DOUBLE_EQ(predict(plan, figures(), 0.25).step_s, 2 + 1.5 + 0.25);
  const Prediction all = predict(plan, figures(), 1);
  EXPECT_DOUBLE_EQ(all.step_s, 3.25) << "nothing is faster than compute";
  EXPECT_EQ(all.limit, Limit::compute);
  EXPECT_DOUBLE_EQ(all.bound_s, 4) << "the bound is that without speculation";
  const Prediction slow = predict(states_on_nvme(5 * kGB, 0), figures(), 1);
  EXPECT_DOUBLE_EQ(slow.step_s, 5.25) << "nor than the disk";
  EXPECT_EQ(slow.limit, Limit::disk);
}

TEST(Predict, SaysNothingBeforeItKnows) {
  MachineFigures none = figures();
  none.steps = 0;
  EXPECT_EQ(predict(states_on_nvme(kGB, 0), none, 0).limit, Limit::unknown);
  MachineFigures no_disk = figures();
  no_disk.disk_bytes_per_s = 0;
  EXPECT_EQ(predict(states_on_nvme(kGB, 0), no_disk, 0).limit, Limit::unknown);
  EXPECT_DOUBLE_EQ(predict(Plan{}, no_disk, 0).step_s, 3.25) << "all on the host needs no disk";
}

// use          embedding            block           head
// its traffic  2 s                  1 s             4 s      at 2 GB/s, less 0.5 s that the ring took
// left         1 s                  0.9 s           0.6 s    of 1 s of forward
TEST(Predict, WhatComesAfterAUnitHidesNothingOfIt) {
  const UnitDemand demands[] = {{4 * kGB, 0, 1}, {2 * kGB, 0, 0.9}, {8 * kGB, 0, 0.6}};
  const Plan plan = states_on_nvme(7 * kGB, kGB / 2);
  const Prediction p = engine::predict(plan, demands, figures(), 0);
  EXPECT_DOUBLE_EQ(p.step_s, 2 + (6.5 + 0.6) + 0.25);
  EXPECT_DOUBLE_EQ(p.bound_s, 2 + 6.5) << "the bound lets compute run under all of it";
  EXPECT_EQ(p.limit, Limit::disk);
  // What has to come first may decide: the same with the large unit first.
  const UnitDemand first[] = {{8 * kGB, 0, 1}, {2 * kGB, 0, 0.9}, {0, 0, 0.6}};
  EXPECT_DOUBLE_EQ(engine::predict(plan, first, figures(), 0).step_s, 2 + (4.5 + 0.9) + 0.25);
}

TEST(Predict, WhatMostOfAStepGoesOnDecides) {
  const Plan plan = states_on_nvme(kGB / 2, 0);
  const UnitDemand embedding[] = {{kGB, 0, 1}};  // half a second before a forward of one
  const Prediction p = engine::predict(plan, embedding, figures(), 0);
  EXPECT_DOUBLE_EQ(p.step_s, 2 + (0.5 + 1) + 0.25);
  EXPECT_EQ(p.limit, Limit::compute) << "half a second of 3.75";
  // Backward waits for weights, 4 of 5.25 s.
  Plan weights = states_on_nvme(0, 0);
  weights.weights_nvme_bytes = weights.nvme_read_bytes_per_step = 8 * kGB;
  EXPECT_EQ(predict(weights, figures(), 0).limit, Limit::disk);
}

TEST(Predict, AShallowRingMovesLess) {
  Plan deep = states_on_nvme(9 * kGB, 0);
  deep.ring_slots = 8;
  EXPECT_DOUBLE_EQ(predict(deep, figures(), 0).disk_s, 9 * 2 / 3.0 * 9 / 8) << "2 slots do 2 / 3, 8 do 8 / 9";
  MachineFigures f = figures();
  f.ring_slots = 0;  // measured where reads alone went by
  EXPECT_DOUBLE_EQ(predict(deep, f, 0).disk_s, 9 * 9 / 8.0);
}

TEST(Predict, UpdatesInMemoryComeBeforeTheirUnitToo) {
  MachineFigures f = figures();
  f.update_s_per_element = 1e-9;
  const UnitDemand demands[] = {{0, kGB / 4, 1}, {0, kGB / 4, 0.5}};
  const Prediction p = engine::predict(Plan{}, demands, f, 0);
  EXPECT_DOUBLE_EQ(p.step_s, 2 + 1.25 + 0.25) << "a quarter of a second goes before the first unit";
  EXPECT_EQ(p.limit, Limit::compute);
  EXPECT_DOUBLE_EQ(engine::predict(Plan{}, demands, f, 1).step_s, 3.25) << "guessed ones went before";
}

TEST(Predict, FiguresAreMediansWithoutWhatTheScriptDoes) {
  StepReport usual;
  usual.total_ns = 20 * kGB;
  usual.compute_ns = {6 * kGB, 4 * kGB, 5 * kGB};  // outside, forward, backward
  usual.call_ns = 1 * kGB;
  usual.wait_by_cause_ns[static_cast<size_t>(engine::Cause::rest)] = 2 * kGB;
  usual.read_bytes = {1 * kGB, 2 * kGB, 4 * kGB};
  usual.written_bytes = {0, 2 * kGB, 0};
  usual.disk_ns = {90 * kGB, 1 * kGB, 3 * kGB};  // outside it may have been stopped
  usual.update_worker_ns = {1 * kGB, 3 * kGB, 0};
  usual.updated_elements = 8 * kGB;
  StepReport disturbed = usual;
  disturbed.total_ns = 70 * kGB;
  disturbed.compute_ns = {0, 40 * kGB, 9 * kGB};
  disturbed.disk_ns = {0, 30 * kGB, 30 * kGB};
  StepReport skipped = usual;  // nothing was updated after it, nothing was moved
  skipped.updated_elements = 0;
  skipped.disk_ns = {};
  const StepReport reports[] = {usual, disturbed, usual, skipped};
  const MachineFigures f = figures_of(reports, {0.5}, states_on_nvme(kGB, 0), 2);
  EXPECT_EQ(f.steps, 4);
  EXPECT_DOUBLE_EQ(f.forward_s, 4);
  EXPECT_DOUBLE_EQ(f.backward_s, 5);
  EXPECT_DOUBLE_EQ(f.call_s, 1);
  EXPECT_DOUBLE_EQ(f.step_s, 12);
  EXPECT_DOUBLE_EQ(f.disk_bytes_per_s, 2e9);
  EXPECT_DOUBLE_EQ(f.update_s_per_element, 0.25e-9) << "4 s of two workers for 8 G elements";
  EXPECT_EQ(f.ring_slots, 2);
  EXPECT_EQ(f.forward_left, std::vector<double>{0.5});
  EXPECT_EQ(figures_of({}, {}, Plan{}, 2).steps, 0);
}

TEST(Predict, DemandsAreWhatThePlanMovesUnderForward) {
  engine::Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {"unused"};
  config.chunk_elements = 4096;
  config.placement = engine::Placement::nvme;
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  const Plan plan = make_plan(layout, config, {});
  ASSERT_GE(layout.units.size(), 3u);
  MachineFigures f = figures();
  f.forward_left.assign(layout.units.size(), 0.5);
  f.forward_left.back() = 1;  // used first
  f.forward_left[0] = 0;      // not used
  const auto found = demands(layout, config, plan, f);
  ASSERT_EQ(found.size(), layout.units.size());
  EXPECT_DOUBLE_EQ(found.front().left_s, 1);
  EXPECT_DOUBLE_EQ(found.back().left_s, 0);
  int64_t bytes = 0;
  int64_t elements = 0;
  for (const UnitDemand& demand : found) bytes += demand.bytes, elements += demand.elements;
  EXPECT_EQ(bytes + plan.weights_nvme_bytes + plan.gradients_nvme_bytes,
            plan.nvme_read_bytes_per_step + plan.nvme_written_bytes_per_step)
      << "backward reads the weights and writes the gradients, forward does the rest";
  int64_t trained = 0;
  for (const engine::Unit& unit : layout.units) trained += unit.trainable() ? unit.elements : 0;
  EXPECT_EQ(elements, trained);
  config.gradient_accumulation = 4;  // sums come and go in backward; forward reads the last
  const Plan summed = make_plan(layout, config, {});
  int64_t more = 0;
  for (const UnitDemand& demand : demands(layout, config, summed, f)) more += demand.bytes;
  EXPECT_EQ(more - bytes, summed.gradients_nvme_bytes - plan.gradients_nvme_bytes);
}

BudgetRow row(int64_t budget, double step_s, bool possible = true) {
  BudgetRow r;
  r.host_budget_bytes = budget;
  r.possible = possible;
  r.prediction = {.bound_s = step_s, .step_s = step_s, .limit = Limit::disk};
  return r;
}

TEST(Predict, TheBestBudgetSavesMostForItsSize) {
  const BudgetRow rows[] = {row(50, 1),           // smaller than now: no advice
                            row(110, 9.9),        // a hundredth is not worth it
                            row(150, 8),          // 2 s for 50
                            row(120, 9),          // 1 s for 20: the best
                            row(105, 1, false)};  // cannot be
  EXPECT_EQ(best_budget(rows, 100, 10), 120);
  EXPECT_EQ(best_budget(std::span(rows).first(2), 100, 10), -1);
}

TEST(Predict, MoreHostMemoryNeverSlowsAStep) {
  engine::Config config;
  config.host_budget_bytes = 1;
  config.nvme = {"unused"};
  config.chunk_elements = 4096;
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  MachineFigures f = figures();
  f.forward_s = f.backward_s = 1e-6;
  const std::vector<int64_t> budgets = {1, 200'000, 250'000, 300'000, 400'000, 600'000, 4'000'000};
  const auto rows = predict_budgets(layout, config, {}, f, budgets);
  ASSERT_EQ(rows.size(), budgets.size());
  EXPECT_FALSE(rows[0].possible);
  double before_s = 1e9;
  int possible = 0;
  for (const BudgetRow& r : rows) {
    if (!r.possible) continue;
    ++possible;
    EXPECT_LE(r.prediction.step_s, before_s) << r.host_budget_bytes;
    before_s = r.prediction.step_s;
  }
  EXPECT_GE(possible, 3);
  EXPECT_EQ(rows.back().prediction.disk_s, 0);
  EXPECT_EQ(rows.back().prediction.limit, Limit::compute);
}

TEST(Predict, AGuessNeedsRoomForItsWeights) {
  engine::Config config;
  config.nvme = {"unused"};
  config.chunk_elements = 4096;
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  config.host_budget_bytes = 64 << 20;
  config.placement = engine::Placement::nvme;
  config.speculate = true;  // gradients stay on the host
  const Plan nvme = make_plan(layout, config, {});
  EXPECT_EQ(guessed_share(layout, nvme, true), 1) << "weights on NVMe need no second ones in memory";
  EXPECT_EQ(guessed_share(layout, nvme, false), 0);
  Plan states = nvme;
  states.weights_on_nvme.assign(layout.units.size(), false);
  states.second_weights = 0;
  EXPECT_EQ(guessed_share(layout, states, true), 0);
  states.second_weights = 1;
  EXPECT_GT(guessed_share(layout, states, true), 0);
  EXPECT_LT(guessed_share(layout, states, true), 1);
}

}  // namespace
}  // namespace overspill::testing
