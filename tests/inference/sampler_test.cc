#include "inference/run/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <stdexcept>
#include <vector>

namespace overspill::inference {
namespace {

/// With drafts that other samplers have used for other vocabularies.
int32_t draw(Sampler& sampler, std::span<const float> logits, std::span<const int32_t> history) {
  static Drafts drafts;
  return sampler.draw(logits, history, drafts);
}

const std::vector<float> kLogits{std::log(0.1f), std::log(0.4f), std::log(0.05f), std::log(0.4f),
                                 std::log(0.05f)};

std::map<int32_t, double> frequencies(Sampling sampling, std::vector<int32_t> history = {}) {
  constexpr int kDraws = 20000;
  Sampler sampler(std::move(sampling));
  std::map<int32_t, double> found;
  for (int i = 0; i < kDraws; ++i) found[draw(sampler, kLogits, history)] += 1.0 / kDraws;
  return found;
}

TEST(Sampler, GreedyTakesTheFirstOfTheLikeliest) {
  Sampler sampler({});
  EXPECT_EQ(draw(sampler, kLogits, {}), 1);
}

TEST(Sampler, DrawsByProbability) {
  const auto found = frequencies({.temperature = 1});
  for (size_t i = 0; i < kLogits.size(); ++i)
    EXPECT_NEAR(found.at(static_cast<int32_t>(i)), std::exp(kLogits[i]), 0.02);
  const auto hot = frequencies({.temperature = 2});
  double total = 0;
  for (const float logit : kLogits) total += std::exp(logit / 2);
  EXPECT_NEAR(hot.at(2), std::exp(kLogits[2] / 2) / total, 0.02);
}

/// Logits over it are infinite, and differences of such are no numbers: the last token was drawn.
TEST(Sampler, ATinyTemperatureTakesTheLikeliest) {
  for (const float temperature : {1e-30f, 1e-38f, 1e-45f}) {
    Sampler sampler({.temperature = temperature});
    EXPECT_EQ(draw(sampler, std::vector<float>{1, 5, 2}, {}), 1) << temperature;
    EXPECT_EQ(draw(sampler, std::vector<float>{-7, -5, -6, -1e30f}, {}), 1) << temperature;
    EXPECT_EQ(draw(sampler, std::vector<float>{-INFINITY, -3, -INFINITY}, {}), 1) << temperature;
  }
  Sampler sampler({.temperature = 0.5f});
  EXPECT_EQ(draw(sampler, std::vector<float>{1e38f, 3e38f, 0}, {}), 1);
}

TEST(Sampler, KeepsTheLikely) {
  EXPECT_EQ(frequencies({.temperature = 1, .top_k = 1}).size(), 1u);
  const auto two = frequencies({.temperature = 1, .top_k = 2});
  ASSERT_EQ(two.size(), 2u);
  EXPECT_NEAR(two.at(1), 0.5, 0.02);
  EXPECT_NEAR(two.at(3), 0.5, 0.02);
  EXPECT_EQ(frequencies({.temperature = 1, .top_k = 99}).size(), 5u);
  EXPECT_EQ(frequencies({.temperature = 1, .top_p = 0.3f}).size(), 1u);
  EXPECT_EQ(frequencies({.temperature = 1, .top_p = 0.79f}).size(), 2u);
  EXPECT_EQ(frequencies({.temperature = 1, .top_p = 0.85f}).size(), 3u);
  EXPECT_EQ(frequencies({.temperature = 1, .min_p = 0.2f}).size(), 3u);
  EXPECT_EQ(frequencies({.temperature = 1, .min_p = 1}).size(), 2u);
  EXPECT_EQ(frequencies({.temperature = 1, .top_k = 4, .top_p = 0.9f, .min_p = 0.5f}).size(), 2u);
}

TEST(Sampler, KeepsHalfOfManyThatAreAlike) {
  // More than are sorted at first; of equal ones the first are kept.
  const std::vector<float> alike(1200, -3.0f);
  Sampler sampler({.temperature = 1, .top_p = 0.5f});
  std::map<int32_t, int> found;
  for (int i = 0; i < 20000; ++i) ++found[draw(sampler, alike, {})];
  EXPECT_EQ(found.size(), 600u);
  EXPECT_EQ(found.rbegin()->first, 599);
}

TEST(Sampler, RepetitionAndBias) {
  Sampler repeats({.repetition = 1.5f});
  // Negative logits are multiplied: token 1 becomes less likely than 3, once however often it was there.
  EXPECT_EQ(draw(repeats, kLogits, std::vector<int32_t>{1, 1, 1}), 3);
  const std::vector<float> positive{3, 2.5f};
  EXPECT_EQ(draw(repeats, positive, std::vector<int32_t>{0}), 1);
  Sampler biased({.bias = {{4, 10.0f}}});
  EXPECT_EQ(draw(biased, kLogits, {}), 4);
  Sampler without({.bias = {{1, -INFINITY}}});
  EXPECT_EQ(draw(without, kLogits, {}), 3);
}

TEST(Sampler, AConstraintExcludes) {
  std::vector<std::vector<int32_t>> histories;
  const auto only_3 = [&](std::span<const int32_t> history, std::span<float> logits) {
    histories.emplace_back(history.begin(), history.end());
    for (size_t i = 0; i < logits.size(); ++i) {
      if (i != 3) logits[i] = -INFINITY;
    }
  };
  for (const float temperature : {0.0f, 5.0f}) {
    Sampler sampler({.temperature = temperature, .bias = {{4, 100.0f}}, .constraint = only_3});
    EXPECT_EQ(draw(sampler, kLogits, std::vector<int32_t>{7, 8}), 3);
  }
  EXPECT_EQ(histories, (std::vector<std::vector<int32_t>>{{7, 8}, {7, 8}}));
}

TEST(Sampler, ASeedGivesTheSameTokens) {
  Sampler a({.temperature = 1, .seed = 5}), b({.temperature = 1, .seed = 5}),
      c({.temperature = 1, .seed = 6});
  std::vector<int32_t> from_a, from_b, from_c;
  for (int i = 0; i < 100; ++i) {
    from_a.push_back(draw(a, kLogits, {}));
    from_b.push_back(draw(b, kLogits, {}));
    from_c.push_back(draw(c, kLogits, {}));
  }
  EXPECT_EQ(from_a, from_b);
  EXPECT_NE(from_a, from_c);
}

TEST(Sampler, WhatCannotBe) {
  EXPECT_THROW(Sampler({.temperature = -1}), std::invalid_argument);
  EXPECT_THROW(Sampler({.temperature = NAN}), std::invalid_argument);
  EXPECT_THROW(Sampler({.temperature = INFINITY}), std::invalid_argument);
  EXPECT_THROW(Sampler({.top_k = -1}), std::invalid_argument);
  EXPECT_THROW(Sampler({.top_p = 0}), std::invalid_argument);
  EXPECT_THROW(Sampler({.top_p = 1.5f}), std::invalid_argument);
  EXPECT_THROW(Sampler({.min_p = -0.1f}), std::invalid_argument);
  EXPECT_THROW(Sampler({.repetition = 0}), std::invalid_argument);
  EXPECT_THROW(Sampler({.bias = {{0, NAN}}}), std::invalid_argument);
  Sampler sampler({.temperature = 1, .repetition = 2, .bias = {{9, 1.0f}}});
  EXPECT_THROW(draw(sampler, kLogits, {}), std::invalid_argument);
  Sampler plain({.temperature = 1, .repetition = 2});
  EXPECT_THROW(draw(plain, kLogits, std::vector<int32_t>{5}), std::invalid_argument);
  EXPECT_THROW(draw(plain, std::vector<float>{0, NAN}, {}), std::invalid_argument);
  EXPECT_THROW(draw(plain, std::vector<float>{INFINITY, 0}, {}), std::invalid_argument);
  EXPECT_THROW(draw(plain, std::vector<float>{-INFINITY, -INFINITY}, {}), std::invalid_argument);
  EXPECT_THROW(draw(plain, std::vector<float>{}, {}), std::invalid_argument);
}

}  // namespace
}  // namespace overspill::inference
