// Gradients as torch's scripts treat them: read, replaced, dropped, zeroed, and used again after a step. Each
// is compared with an engine that was given the same gradients in the first place.
#include "tests/engine/kept_gradients.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "engine/resources.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Placement;
using engine::Segment;
using engine::Unit;

TEST_P(Kept, AGradientIsReadInItsDtype) {
  auto engine = make();
  give(*engine, 0);
  for_each(*engine, [&](int u, int s, const Unit& unit, const Segment& segment) {
    const std::vector<std::byte> given = gradient(unit, segment, u, s, 0);
    std::vector<std::byte> read(given.size());
    engine->read_gradient(u, s, read, unit.dtype);
    EXPECT_EQ(read, given) << segment.name;
  });
  step(*engine, 0);
  std::vector<std::byte> none(
      gradient(engine->layout().units[0], engine->layout().units[0].segments[0], 0, 0, 0).size());
  EXPECT_THROW(engine->read_gradient(0, 0, none, engine->layout().units[0].dtype), std::invalid_argument)
      << "the step has used it";
}

TEST_P(Kept, OnesThatReplaceOthersAreThoseOfTheStep) {
  auto engine = make();
  auto expected = make();
  for (int i = 0; i < 3; ++i) {
    give(*engine, i);
    for_each(*engine, [&](int u, int s, const Unit& unit, const Segment& segment) {
      if ((u + s) % 2 == 0) engine->replace_gradient(u, s, gradient(unit, segment, u, s, 40 + i), unit.dtype);
    });
    give(*expected, i, [](int u, int s) { return (u + s) % 2 != 0; });
    give(*expected, 40 + i, [](int u, int s) { return (u + s) % 2 == 0; });
    step(*engine, i);
    step(*expected, i);
  }
  expect_alike(*engine, *expected, "replaced");
}

TEST_P(Kept, ThoseThatAreDroppedUpdateNothing) {
  auto engine = make();
  auto expected = make();
  for (int i = 0; i < 3; ++i) {
    give(*engine, i);
    engine->replace_gradient(0, 0, {}, "");
    engine->replace_gradient(5, 0, {}, "");
    EXPECT_FALSE(engine->has_gradient(5, 0));
    give(*expected, i, [](int u, int s) { return s != 0 || (u != 0 && u != 5); });
    step(*engine, i);
    step(*expected, i);
  }
  expect_alike(*engine, *expected, "dropped");
}

TEST_P(Kept, AStepAppliesThemAgain) {
  auto engine = make();
  auto expected = make();
  give(*engine, 0);
  step(*engine, 0);
  for (int i = 1; i < 4; ++i) {
    engine->reuse_gradients();
    step(*engine, i);
  }
  for (int i = 0; i < 4; ++i) {
    give(*expected, 0);
    step(*expected, i);
  }
  expect_alike(*engine, *expected, "used again");
}

TEST_P(Kept, OthersAreAddedToThem) {
  auto engine = make();
  auto expected = make();
  for (int i = 0; i < 3; ++i) {
    if (i > 0) engine->reuse_gradients();
    give(*engine, i, [i](int u, int s) { return i == 0 || (u + s) % 3 != 0; });
    step(*engine, i);
    give(*expected, 0);
    for (int k = 1; k <= i; ++k) give(*expected, k, [](int u, int s) { return (u + s) % 3 != 0; });
    step(*expected, i);
  }
  expect_alike(*engine, *expected, "added");
}

TEST_P(Kept, WhatWasClearedIsNotUsedAgain) {
  auto engine = make();
  auto expected = make();
  give(*engine, 0);
  step(*engine, 0);
  engine->clear_gradients();
  engine->reuse_gradients();
  EXPECT_FALSE(engine->has_gradient(0, 0));
  give(*engine, 1, [](int u, int) { return u > 2; });
  step(*engine, 1);
  give(*expected, 0);
  step(*expected, 0);
  give(*expected, 1, [](int u, int) { return u > 2; });
  step(*expected, 1);
  expect_alike(*engine, *expected, "cleared");
}

TEST_P(Kept, ZerosDecayWeightsAndMoments) {
  auto engine = make();
  auto expected = make();
  for (Engine* each : {engine.get(), expected.get()}) {
    give(*each, 0);
    step(*each, 0);
  }
  for (int i = 1; i < 4; ++i) {
    engine->zero_gradients();
    EXPECT_TRUE(engine->has_gradient(0, 0));
    give(*engine, i, [i](int u, int) { return i == 2 && u < 3; });
    step(*engine, i);
    for_each(*expected, [&](int u, int s, const Unit& unit, const Segment& segment) {
      std::vector<std::byte> given = gradient(unit, segment, u, s, i);
      if (i != 2 || u >= 3) std::fill(given.begin(), given.end(), std::byte{0});
      expected->add_gradient(u, s, given, unit.dtype);
    });
    step(*expected, i);
  }
  expect_alike(*engine, *expected, "zeros");
}

TEST_P(Kept, ZerosAreOfWhatWasThereOnly) {
  auto engine = make();
  auto expected = make();
  engine->zero_gradients();
  EXPECT_FALSE(engine->has_gradient(0, 0));
  const auto some = [](int u, int) { return u == 0; };
  for (Engine* each : {engine.get(), expected.get()}) {
    give(*each, 0, some);
    step(*each, 0);
  }
  engine->zero_gradients();
  std::vector<std::byte> seen(
      gradient(engine->layout().units[0], engine->layout().units[0].segments[0], 0, 0, 0).size(),
      std::byte{1});
  engine->read_gradient(0, 0, seen, engine->layout().units[0].dtype);
  EXPECT_EQ(seen, std::vector<std::byte>(seen.size())) << "before anything has written them";
  EXPECT_EQ(engine->grad_norm(), 0);
  engine->clear_gradients();
  give(*engine, 1);
  give(*expected, 1);
  step(*engine, 1);
  step(*expected, 1);
  expect_alike(*engine, *expected, "cleared zeros");
}

TEST_P(Kept, ThoseOfAStepThatClippedAreClippedOnce) {
  auto engine = make();
  give(*engine, 0);
  const double norm = engine->clip_grad_norm(0.25);
  ASSERT_GT(norm, 0.5);
  step(*engine, 0);
  engine->reuse_gradients();
  EXPECT_NEAR(engine->grad_norm(), 0.25, 0.25 * 0.01) << "bf16 rounds each";
  EXPECT_NEAR(engine->clip_grad_norm(std::numeric_limits<double>::infinity()), 0.25, 0.25 * 0.01);
  EXPECT_EQ(engine->step(toy_groups(1)).clip, 1);
}

TEST_P(Kept, WhatComesAfterAClipIsAddedToWhatItLeft) {
  auto engine = make();
  give(*engine, 0);
  engine->clip_grad_norm(0.25);
  const double clipped = engine->grad_norm();
  give(*engine, 0, [](int u, int) { return u == 5; });
  EXPECT_GT(engine->grad_norm(), clipped);
  EXPECT_EQ(engine->step(toy_groups(0)).clip, 1) << "what the clip scaled is scaled";
}

TEST_P(Kept, ALookAtClippedOnesChangesNoBitOfTheStep) {
  auto engine = make();
  auto expected = make();
  for (int i = 0; i < 3; ++i) {
    for (Engine* each : {engine.get(), expected.get()}) {
      give(*each, i);
      each->clip_grad_norm(0.25);
    }
    const Unit& unit = engine->layout().units[0];
    std::vector<std::byte> seen(gradient(unit, unit.segments[0], 0, 0, i).size());
    engine->read_gradient(0, 0, seen, unit.dtype);
    step(*engine, i);
    step(*expected, i);
  }
  expect_alike(*engine, *expected, "looked at");
}

TEST_P(Kept, WrongSizesChangeNothing) {
  auto engine = make();
  auto expected = make();
  for (Engine* each : {engine.get(), expected.get()}) give(*each, 0);
  std::vector<std::byte> wrong(6);
  EXPECT_THROW(engine->replace_gradient(0, 0, wrong, "F32"), std::invalid_argument);
  EXPECT_THROW(engine->replace_gradient(0, 0, wrong, "I8"), std::invalid_argument);
  EXPECT_THROW(engine->read_gradient(0, 0, wrong, "F32"), std::invalid_argument);
  EXPECT_THROW(engine->replace_gradient(0, 99, {}, ""), std::invalid_argument);
  step(*engine, 0);
  step(*expected, 0);
  expect_alike(*engine, *expected, "refused");
}

/// Segments of several chunks of the default size, and of one that is larger: pieces of a gradient keep to
/// chunks.
class KeptOfLargeChunks : public ::testing::TestWithParam<int64_t> {
 protected:
  static std::vector<engine::UnitSpec> units() {
    return {
        {"large", optim::Format::fp32, "F32", {{"weight", {1200, 1000}, 0, {}}, {"bias", {1000}, 0, {}}}}};
  }
  static std::unique_ptr<Engine> make(Placement placement) {
    Config config;
    config.host_budget_bytes = 256 << 20;
    config.nvme = {"memory"};
    config.chunk_elements = GetParam();
    config.placement = placement;
    return std::make_unique<Engine>(units(), config, make_resources(units(), config, {"host", "memory", 3}));
  }
  static void give(Engine& engine) {
    engine.begin_pass({true, true});
    for (int s = 0; s < 2; ++s) {
      std::vector<float> gradient(static_cast<size_t>(engine.layout().units[0].segments[s].elements));
      for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<float>(i % 97) - 48;
      engine.add_gradient(0, s, std::as_bytes(std::span(gradient)), "F32");
    }
  }
  static std::vector<float> read(Engine& engine) {
    std::vector<float> gradient(static_cast<size_t>(engine.layout().units[0].segments[0].elements));
    engine.read_gradient(0, 0, std::as_writable_bytes(std::span(gradient)), "F32");
    return gradient;
  }
};

TEST_P(KeptOfLargeChunks, ZerosAreZeros) {
  auto engine = make(Placement::nvme);
  give(*engine);
  engine->step(toy_groups(0));
  engine->zero_gradients();
  EXPECT_EQ(engine->grad_norm(), 0);
  EXPECT_EQ(read(*engine), std::vector<float>(1'200'000));
  EXPECT_EQ(engine->step(toy_groups(0)).norm, 0);
}

TEST_P(KeptOfLargeChunks, ClippedOnesAreReadAndAddedTo) {
  auto engine = make(Placement::nvme);
  auto host = make(Placement::host);
  for (Engine* each : {engine.get(), host.get()}) {
    give(*each);
    each->clip_grad_norm(0.25);
  }
  EXPECT_EQ(read(*engine), read(*host));
  for (Engine* each : {engine.get(), host.get()}) give(*each);
  EXPECT_EQ(read(*engine), read(*host));
  EXPECT_EQ(engine->step(toy_groups(0)).norm, host->step(toy_groups(0)).norm);
}

INSTANTIATE_TEST_SUITE_P(Elements, KeptOfLargeChunks, ::testing::Values(4096, 512 * 1024, 1 << 20, 1 << 21));

INSTANTIATE_TEST_SUITE_P(Cases, Kept, kept_cases(), [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace overspill::testing
