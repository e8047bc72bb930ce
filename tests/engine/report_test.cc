// The step's report: every instant counted once, under what went on in it.
#include "engine/telemetry/report.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "engine/engine.h"
#include "engine/resources.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Activity;
using engine::Cause;
using engine::Phase;
using engine::StepMeter;
using engine::StepReport;

int64_t time_ns = 0;
int64_t clock_ns() {
  return time_ns;
}

int64_t of(const std::array<int64_t, 3>& values, Phase phase) {
  return values[static_cast<size_t>(phase)];
}

TEST(StepMeter, BlamesTheDiskForAWaitOnlyWhileNoUpdateRuns) {
  time_ns = 0;
  StepMeter meter(clock_ns);
  meter.enter(Phase::forward), meter.begin(Activity::wait), meter.begin(Activity::read);
  time_ns = 10, meter.begin(Activity::update);
  time_ns = 25, meter.end(Activity::update);
  time_ns = 30, meter.end(Activity::read), meter.end(Activity::wait);
  meter.stepped(1);
  EXPECT_EQ(meter.last().wait_ns, 30);
  EXPECT_EQ(meter.last().wait_for_disk_ns, 10 + 5);
}

// ns:      0    10   20   30   40   50   60   70   80   90   100
// phase    outside | forward           | backward
// call               ====           =========
// wait                                   =====
// update             ==============  (two workers from 30 to 40)
// read                         ===============
TEST(StepMeter, CountsEveryInstantUnderAllThatWentOn) {
  time_ns = 0;
  StepMeter meter(clock_ns);
  const auto at = [](int64_t ns) { time_ns = ns; };
  at(10), meter.enter(Phase::forward);
  at(20), meter.begin(Activity::call), meter.begin(Activity::update);
  at(30), meter.end(Activity::call), meter.begin(Activity::update);
  at(40), meter.end(Activity::update), meter.begin(Activity::read);
  at(50), meter.end(Activity::update), meter.enter(Phase::backward), meter.begin(Activity::call);
  at(60), meter.begin(Activity::wait);
  at(70), meter.end(Activity::read), meter.moved(Activity::read, 4096);
  at(75), meter.end(Activity::wait), meter.waited(Cause::updates, 15), meter.end(Activity::call);
  meter.updated(7);
  at(100), meter.stepped(3);

  const StepReport& r = meter.last();
  EXPECT_EQ(r.step, 3);
  EXPECT_EQ(r.total_ns, 100);
  EXPECT_EQ(of(r.compute_ns, Phase::outside), 10);
  EXPECT_EQ(of(r.compute_ns, Phase::forward), 10 + 20);
  EXPECT_EQ(of(r.compute_ns, Phase::backward), 25);
  EXPECT_EQ(r.call_ns, 10 + 10);
  EXPECT_EQ(r.wait_ns, 15);
  EXPECT_EQ(r.compute_sum_ns() + r.call_ns + r.wait_ns, r.total_ns);
  EXPECT_EQ(r.wait_by_cause_ns[static_cast<size_t>(Cause::updates)], 15);
  EXPECT_EQ(r.wait_for_disk_ns, 10) << "from 60 to 70: a read went on, no update did";
  EXPECT_EQ(r.update_ns, 30);
  EXPECT_EQ(r.update_hidden_ns, 30);
  EXPECT_EQ(of(r.update_worker_ns, Phase::forward), 10 + 20 + 10);
  EXPECT_EQ(r.update_worker_sum_ns(), 40);
  EXPECT_EQ(r.updated_elements, 7);
  EXPECT_EQ(r.read_ns, 30);
  EXPECT_EQ(r.write_ns, 0);
  EXPECT_EQ(r.disk_sum_ns(), 30);
  EXPECT_EQ(of(r.disk_ns, Phase::forward), 10);
  EXPECT_EQ(r.disk_hidden_ns, 20);
  EXPECT_EQ(of(r.read_bytes, Phase::backward), 4096);
  EXPECT_EQ(r.read_sum_bytes(), 4096);
  EXPECT_EQ(r.written_sum_bytes(), 0);
}

// Between two steps a run saves, measures, or stands still while another process has its turn.
TEST(StepMeter, WhatPassesBetweenTwoStepsIsNoPartOfTheSecondAlone) {
  time_ns = 0;
  StepMeter meter(clock_ns);
  const auto at = [](int64_t ns) { time_ns = ns; };
  at(1), meter.enter(Phase::forward), meter.begin(Activity::write), meter.begin(Activity::update);
  at(10), meter.stepped(1);
  at(12), meter.begin(Activity::wait);
  at(15), meter.end(Activity::wait), meter.waited(Cause::rest, 3), meter.moved(Activity::write, 512);
  at(1000), meter.enter(Phase::forward);
  at(1004), meter.end(Activity::update), meter.enter(Phase::backward);
  at(1010), meter.begin(Activity::wait);
  at(1013), meter.end(Activity::wait), meter.waited(Cause::reads, 3);
  at(1014), meter.end(Activity::write), meter.moved(Activity::write, 4096);
  at(1020), meter.stepped(2);

  const StepReport& alone = meter.last_inside();
  EXPECT_EQ(meter.sum().step, 2);
  EXPECT_EQ(meter.sum().total_ns, 10 + meter.last().total_ns) << "of both steps, and the time between them";
  EXPECT_EQ(meter.sum().written_sum_bytes(), 512 + 4096);
  EXPECT_EQ(meter.sum().wait_by_cause_ns[static_cast<size_t>(Cause::rest)], 3);
  EXPECT_EQ(alone.step, 2);
  EXPECT_EQ(alone.total_ns, 20);
  EXPECT_EQ(alone.compute_sum_ns(), 17);
  EXPECT_EQ(of(alone.compute_ns, Phase::outside), 0);
  EXPECT_EQ(alone.wait_ns, 3);
  EXPECT_EQ(alone.wait_by_cause_ns[static_cast<size_t>(Cause::rest)], 0);
  EXPECT_EQ(alone.wait_by_cause_ns[static_cast<size_t>(Cause::reads)], 3);
  EXPECT_EQ(alone.update_ns, 4);
  EXPECT_EQ(alone.update_worker_sum_ns(), 4);
  EXPECT_EQ(alone.write_ns, 14);
  EXPECT_EQ(alone.disk_sum_ns(), 14);
  EXPECT_EQ(alone.written_sum_bytes(), 4096);
  EXPECT_EQ(meter.last().total_ns, 1010) << "the whole report has all of it";
  EXPECT_EQ(meter.last().wait_by_cause_ns[static_cast<size_t>(Cause::rest)], 3);
  at(1030), meter.stepped(3);
  EXPECT_EQ(meter.last_inside().total_ns, 0);
  EXPECT_EQ(meter.last_inside().wait_by_cause_ns[static_cast<size_t>(Cause::reads)], 0);
}

TEST(StepMeter, WhatGoesOnOverAStepCountsInBoth) {
  time_ns = 0;
  StepMeter meter(clock_ns);
  meter.begin(Activity::write);
  time_ns = 10, meter.stepped(1);
  EXPECT_EQ(meter.last().write_ns, 10);
  time_ns = 14, meter.end(Activity::write), meter.moved(Activity::write, 8192);
  time_ns = 20, meter.stepped(2);
  EXPECT_EQ(meter.last().total_ns, 10);
  EXPECT_EQ(meter.last().write_ns, 4);
  EXPECT_EQ(of(meter.last().written_bytes, Phase::outside), 8192);
  EXPECT_THROW(meter.end(Activity::write), std::logic_error);
}

TEST(StepMeter, RemembersTheLatestStepsButTheFirstTwo) {
  time_ns = 0;
  StepMeter meter(clock_ns);
  for (int step = 1; step <= 2; ++step) ++time_ns, meter.stepped(step);
  EXPECT_TRUE(meter.recent().empty());
  for (int step = 3; step <= 20; ++step) ++time_ns, meter.stepped(step);
  ASSERT_EQ(meter.recent().size(), 16u);
  int64_t steps = 0;
  for (const StepReport& report : meter.recent()) steps += report.step;
  EXPECT_EQ(steps, (5 + 20) * 16 / 2);
}

TEST(StepMeter, SaysWhatOfForwardWasLeftWhenAUnitWasReached) {
  time_ns = 0;
  StepMeter meter(clock_ns, 4);
  const auto at = [](int64_t ns) { time_ns = ns; };
  at(5), meter.reached(3), meter.enter(Phase::forward);  // outside: an evaluation, it does not count
  meter.reached(0);
  at(15), meter.begin(Activity::call), meter.reached(1), meter.begin(Activity::wait);
  at(95), meter.end(Activity::wait), meter.end(Activity::call);  // waiting is no compute
  at(110), meter.begin(Activity::read), meter.reached(2), meter.reached(1);
  at(120), meter.end(Activity::read);
  at(125), meter.enter(Phase::backward), meter.reached(2);
  at(200), meter.stepped(1);
  EXPECT_EQ(meter.forward_left(), (std::vector<double>{1, 0.75, 0.375, 0})) << "of 40 ns";
  at(201), meter.enter(Phase::forward), meter.reached(2);
  at(203), meter.stepped(2);
  EXPECT_EQ(meter.forward_left(), (std::vector<double>{0, 0, 1, 0})) << "of the last step alone";
  at(204), meter.enter(Phase::forward);
  at(208), meter.stepped(3);
  EXPECT_EQ(meter.forward_left(), std::vector<double>(4, 0)) << "nor of the one before it";
}

/// A report of an engine's third step, with everything in `placement`.
struct ToyRun {
  StepReport report;
  engine::Plan plan;
  engine::StepReport before;  // the first step
};

ToyRun run_toy(engine::Placement placement) {
  engine::Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {"unused"};
  config.threads = 2;
  config.chunk_elements = 4096;
  config.placement = placement;
  config.prefetch_units = 0;  // nothing is read before it is asked for: counts that do not depend on timing
  engine::ResourceOptions options;
  options.io_backend = "memory";
  engine::Engine engine(toy_units(), config, engine::make_resources(toy_units(), config, options));
  toy_load(engine);
  ToyRun run;
  run.before = engine.report();
  for (int step = 1; step <= 3; ++step) {
    toy_step(engine, step, 1, 0);
    engine.synchronize();  // so that a step's writes count in the report that follows it, all of them
  }
  toy_step(engine, 4, 1, 0);
  run.report = engine.report();
  run.plan = engine.plan();
  return run;
}

TEST(Report, BytesAreThoseThatThePlanSays) {
  const ToyRun run = run_toy(engine::Placement::nvme);
  EXPECT_EQ(run.before.total_ns, 0) << "there was no step yet";
  EXPECT_EQ(run.report.step, 4);
  // Layers that a step skips are not updated. Weights that were written before forward asks for them are read
  // once more.
  EXPECT_LE(run.report.read_sum_bytes(), run.plan.nvme_read_bytes_per_step + run.plan.weights_nvme_bytes);
  EXPECT_GE(run.report.read_sum_bytes(), run.plan.nvme_read_bytes_per_step / 2);
  EXPECT_LE(run.report.written_sum_bytes(), run.plan.nvme_written_bytes_per_step);
  EXPECT_GE(run.report.written_sum_bytes(), run.plan.nvme_written_bytes_per_step / 2);
  EXPECT_GT(run.report.read_ns, 0);
  EXPECT_GT(run.report.write_ns, 0);
}

TEST(Report, SumsUpToTheWholeStep) {
  const ToyRun run = run_toy(engine::Placement::host);
  const StepReport& r = run.report;
  EXPECT_EQ(r.compute_sum_ns() + r.call_ns + r.wait_ns, r.total_ns);
  EXPECT_GT(of(r.compute_ns, Phase::forward), 0);
  EXPECT_GT(of(r.compute_ns, Phase::backward), 0);
  EXPECT_GT(r.call_ns, 0);
  EXPECT_GT(r.updated_elements, 0);
  EXPECT_GE(r.update_worker_sum_ns(), r.update_ns);
  EXPECT_EQ(r.disk_sum_ns(), 0) << "nothing is on NVMe";
}

}  // namespace
}  // namespace overspill::testing
