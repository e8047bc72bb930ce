// clip_grad_norm() means what torch's does: it scales the gradients that are there when it is called. And a
// step that is skipped names the parameter which is the reason.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/resources.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Placement;

class Clipping : public ::testing::TestWithParam<Placement> {
 protected:
  std::unique_ptr<Engine> make(double configured = 0) {
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = {"memory"};
    config.chunk_elements = 4096;
    config.placement = GetParam();
    config.max_grad_norm = configured;
    auto engine = std::make_unique<Engine>(toy_units(), config,
                                           make_resources(toy_units(), config, {"host", "memory", 3}));
    toy_load(*engine);
    return engine;
  }
  static void backward(Engine& engine, int step = 0) {
    engine.begin_pass({true, true});
    for (int u = 5; u >= 0; --u) toy_backward(engine, engine.acquire(u), u, step, 0, 0);
  }
};

TEST_P(Clipping, ASecondClipWorksOnWhatTheFirstOneLeft) {
  auto engine = make();
  backward(*engine);
  const double norm = engine->grad_norm();
  EXPECT_EQ(engine->clip_grad_norm(norm / 2), norm);
  const double factor = norm / 2 / (norm + 1e-6);
  EXPECT_DOUBLE_EQ(engine->grad_norm(), norm * factor);
  EXPECT_DOUBLE_EQ(engine->clip_grad_norm(norm), norm * factor);  // larger: changes nothing
  EXPECT_DOUBLE_EQ(engine->clip_grad_norm(std::numeric_limits<double>::infinity()), norm * factor);
  EXPECT_DOUBLE_EQ(engine->clip_grad_norm(norm / 8), norm * factor);
  const engine::StepResult result = engine->step(toy_groups(0));
  EXPECT_NEAR(result.clip, 1.0 / 8, 1e-6);
  EXPECT_EQ(result.norm, norm);
}

TEST_P(Clipping, OnceGivesTheBitsOfTheConfiguredLimit) {
  auto configured = make(0.25);
  auto called = make(7.0);  // the call counts, once
  for (int step = 0; step < 2; ++step) {
    backward(*configured, step);
    backward(*called, step);
    called->clip_grad_norm(0.25);
    const auto a = configured->step(toy_groups(step));
    const auto b = called->step(toy_groups(step));
    EXPECT_EQ(a.clip, b.clip);
    EXPECT_LT(a.clip, 1);
  }
  EXPECT_EQ(toy_contents(*configured), toy_contents(*called));
  backward(*called, 2);
  const double norm = called->clip_grad_norm(std::numeric_limits<double>::infinity());
  EXPECT_EQ(called->step(toy_groups(2)).clip, std::min(1.0, 7.0 / (norm + 1e-6)))
      << "to look at the norm is not to clip";
}

TEST_P(Clipping, AGradientReadAfterwardsIsScaled) {
  auto engine = make();
  backward(*engine);
  std::vector<float> before(static_cast<size_t>(engine->layout().units[0].segments[0].elements));
  std::vector<float> after(before.size());
  engine->read_state(0, 0, "grad", before);
  const double norm = engine->clip_grad_norm(0.25);
  engine->read_state(0, 0, "grad", after);
  const auto factor = static_cast<float>(0.25 / (norm + 1e-6));
  for (size_t i = 0; i < before.size(); ++i) ASSERT_EQ(after[i], before[i] * factor) << i;
}

TEST_P(Clipping, GoesWithTheGradientsThatItScaled) {
  auto engine = make();
  const std::vector<float> more(5000, 1.0F);
  const auto add = [&] { engine->add_gradient(5, 0, std::as_bytes(std::span(more)), "F32"); };
  add();
  engine->clip_grad_norm(0.25);
  engine->clear_gradients();
  add();
  EXPECT_EQ(engine->step(toy_groups(1)).clip, 1);
  engine->clip_grad_norm(0.25);  // of none
  add();
  EXPECT_EQ(engine->step(toy_groups(2)).clip, 1);
}

TEST_P(Clipping, ASkippedStepNamesTheParameter) {
  auto engine = make();
  backward(*engine);
  EXPECT_EQ(engine->step(toy_groups(0)).not_finite, "");
  backward(*engine);
  std::vector<float> bad(5000, 1.0F);
  bad[4321] = std::numeric_limits<float>::quiet_NaN();
  engine->add_gradient(5, 0, std::as_bytes(std::span(bad)), "F32");
  const engine::StepResult result = engine->step(toy_groups(1));
  EXPECT_TRUE(result.skipped);
  EXPECT_EQ(result.not_finite, engine->layout().units[5].segments[0].name);
}

INSTANTIATE_TEST_SUITE_P(Placements, Clipping,
                         ::testing::Values(Placement::host, Placement::half, Placement::nvme));

}  // namespace
}  // namespace overspill::testing
