// Several optimizers, each over units of its own: a step of one, and what clears its gradients, leaves those
// of the others as they are.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "engine/resources.h"
#include "tests/engine/kept_gradients.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::GroupRange;
using engine::Segment;
using engine::Unit;

constexpr GroupRange kEven{0, 1};  // units
constexpr GroupRange kOdd{1, 2};

bool is_even(int unit, int /*segment*/) {
  return unit % 2 == 0;
}
bool is_odd(int unit, int segment) {
  return !is_even(unit, segment);
}

std::vector<engine::UnitSpec> units_of_two() {
  std::vector<engine::UnitSpec> units = toy_units();
  for (size_t u = 0; u < units.size(); ++u) {
    for (engine::SegmentSpec& segment : units[u].segments) segment.group = static_cast<int64_t>(u % 2);
  }
  return units;
}

class SeveralOptimizers : public Kept {
 protected:
  std::unique_ptr<Engine> make_two() { return make(units_of_two()); }
  static engine::StepResult step_of(Engine& engine, GroupRange range, int step) {
    const std::vector<optim::Hyper> groups = toy_groups(step);
    return engine.step(std::span(groups).subspan(static_cast<size_t>(range.first), 1), range);
  }
  static int first_of(const Engine& engine, bool (*takes)(int, int)) {
    const auto& units = engine.layout().units;
    for (int u = 0; u < std::ssize(units); ++u) {
      if (units[u].trainable() && takes(u, 0)) return u;
    }
    throw std::logic_error("there is none");
  }
};

TEST_P(SeveralOptimizers, StepTheirOwn) {
  auto engine = make_two();
  auto expected = make_two();
  for (int i = 0; i < 3; ++i) {
    give(*engine, i);
    const double odd_norm = engine->grad_norm(kOdd);
    step_of(*engine, kEven, i);
    EXPECT_EQ(engine->grad_norm(), odd_norm) << "those of the other are there, and no others";
    EXPECT_EQ(step_of(*engine, kOdd, i).norm, odd_norm);
    give(*expected, i, is_even);
    step(*expected, i);
    give(*expected, i, is_odd);
    step(*expected, i);
    expect_alike(*engine, *expected, "two steps");
  }
}

TEST_P(SeveralOptimizers, StepWhereAWholeStepWasExpected) {
  auto engine = make_two();
  auto expected = make_two();
  for (int i = 0; i < 3; ++i) {
    if (GetParam().speculate) engine->expect_step(toy_groups(i));
    give(*engine, i);
    while (engine->stats().guesses_unfinished > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    step_of(*engine, kOdd, i);
    EXPECT_EQ(engine->stats().guesses_taken, 0);
    engine->clear_gradients();
    give(*expected, i, is_odd);
    step(*expected, i);
    expect_alike(*engine, *expected, "expected");
  }
}

TEST_P(SeveralOptimizers, AddUpWhatIsNotTheirs) {
  auto engine = make_two();
  auto expected = make_two();
  for (int i = 0; i < 3; ++i) {
    give(*engine, i);
    step_of(*engine, kEven, i);
    engine->clear_gradients(kEven);
    give(*expected, i, is_even);
    step(*expected, i);
  }
  step_of(*engine, kOdd, 3);
  for (int i = 0; i < 3; ++i) give(*expected, i, is_odd);
  step(*expected, 3);
  expect_alike(*engine, *expected, "added up");
}

TEST_P(SeveralOptimizers, ClearTheirOwn) {
  auto engine = make_two();
  auto expected = make_two();
  give(*engine, 0);
  step_of(*engine, kEven, 0);
  engine->clear_gradients(kOdd);  // while the updates of the even ones are under way
  engine->reuse_gradients();
  EXPECT_TRUE(engine->has_gradient(first_of(*engine, is_even), 0));
  EXPECT_FALSE(engine->has_gradient(first_of(*engine, is_odd), 0));
  step_of(*engine, kEven, 1);
  give(*expected, 0, is_even);
  step(*expected, 0);
  give(*expected, 0, is_even);
  step(*expected, 1);
  expect_alike(*engine, *expected, "cleared");
}

TEST_P(SeveralOptimizers, MakeTheirOwnZero) {
  auto engine = make_two();
  auto expected = make_two();
  for (Engine* each : {engine.get(), expected.get()}) {
    give(*each, 0);
    step(*each, 0);
  }
  engine->zero_gradients(kEven);
  EXPECT_EQ(engine->grad_norm(), 0);
  step_of(*engine, kEven, 1);
  for_each(*expected, [&](int u, int s, const Unit& unit, const Segment& segment) {
    const std::vector<std::byte> zeros(gradient(unit, segment, u, s, 0).size());
    if (is_even(u, s)) expected->add_gradient(u, s, zeros, unit.dtype);
  });
  step(*expected, 1);
  expect_alike(*engine, *expected, "zeros");
}

TEST_P(SeveralOptimizers, LeaveOutStepsOfTheirOwn) {
  auto engine = make_two();
  auto expected = make_two();
  give(*engine, 0);
  const int odd = first_of(*engine, is_odd);
  const Unit& unit = engine->layout().units[odd];
  const std::vector<std::byte> nan(gradient(unit, unit.segments[0], odd, 0, 0).size(), std::byte{0xFF});
  engine->replace_gradient(odd, 0, nan, unit.dtype);
  EXPECT_FALSE(std::isfinite(engine->grad_norm()));
  EXPECT_FALSE(step_of(*engine, kEven, 0).skipped);
  engine->reuse_gradients();
  const engine::StepResult skipped = step_of(*engine, kOdd, 0);
  EXPECT_TRUE(skipped.skipped);
  EXPECT_EQ(skipped.not_finite, unit.segments[0].name);
  EXPECT_FALSE(engine->has_gradient(odd, 0));
  EXPECT_TRUE(engine->has_gradient(first_of(*engine, is_even), 0)) << "a skipped step clears its own";
  engine->skip_step(kOdd);
  step_of(*engine, kEven, 1);
  for (int i = 0; i < 2; ++i) {
    give(*expected, 0, is_even);
    step(*expected, i);
  }
  expect_alike(*engine, *expected, "left out");
}

TEST_P(SeveralOptimizers, AreClippedTogether) {
  auto engine = make_two();
  auto expected = make_two();
  for (Engine* each : {engine.get(), expected.get()}) {
    give(*each, 0);
    each->clip_grad_norm(0.25);
  }
  step_of(*engine, kOdd, 0);
  step_of(*engine, kEven, 0);
  step(*expected, 0);
  expect_alike(*engine, *expected, "clipped");
}

TEST_P(SeveralOptimizers, UseTheirOwn) {
  auto engine = make_two();
  auto expected = make_two();
  give(*engine, 0);
  engine->use_gradients(kOdd);
  EXPECT_FALSE(engine->has_gradient(first_of(*engine, is_odd), 0));
  step_of(*engine, kEven, 0);
  give(*expected, 0, is_even);
  step(*expected, 0);
  expect_alike(*engine, *expected, "used");
}

TEST_P(SeveralOptimizers, HaveWholeUnits) {
  auto engine = make();  // with two groups in a unit
  auto expected = make();
  for (Engine* each : {engine.get(), expected.get()}) give(*each, 0);
  EXPECT_THROW(step_of(*engine, kEven, 0), std::invalid_argument);
  EXPECT_THROW(engine->clear_gradients(kEven), std::invalid_argument);
  EXPECT_THROW(engine->grad_norm(kEven), std::invalid_argument);
  step(*engine, 0);
  step(*expected, 0);
  expect_alike(*engine, *expected, "refused");
}

TEST_P(SeveralOptimizers, GiveTheGroupsOfTheirRange) {
  auto engine = make_two();
  give(*engine, 0);
  const std::vector<optim::Hyper> none;
  EXPECT_THROW(engine->step(none, kOdd), std::invalid_argument);
  EXPECT_THROW(engine->step(toy_groups(0, optim::optimizer_named("lion")), kOdd), std::invalid_argument);
  EXPECT_TRUE(engine->has_gradient(first_of(*engine, is_odd), 0));
}

INSTANTIATE_TEST_SUITE_P(Cases, SeveralOptimizers, kept_cases(),
                         [](const auto& info) { return name_of(info.param); });

TEST(SeveralOptimizersOfOneLimit, AreRefused) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.max_grad_norm = 1;
  Engine engine(units_of_two(), config, make_resources(units_of_two(), config, {"host", "memory", 3}));
  EXPECT_THROW(engine.step(toy_groups(0), kEven), std::invalid_argument);
  engine.step(toy_groups(0));
}

}  // namespace
}  // namespace overspill::testing
