// Stochastic rounding: unbiased, a function of (seed, step, element) and of nothing else, and quiet over
// time. Fixed seeds; bounds are five standard deviations or more, so they hold for any good generator.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "cpu_optim/update.h"
#include "tests/cpu_optim/update_cases.h"
#include "tests/reference/update.h"

namespace overspill::optim {
namespace {

/// One update by `hyper` of `n` equal elements; what comes back is the mean of a state or of the weight.
struct Means {
  double weight, state;
};
Means means(const Hyper& hyper, Format format, float weight, float gradient, int64_t n, const Step& step) {
  Bytes b(optimizer_of(hyper), format, Element::fp32, n);
  for (int64_t i = 0; i < n; ++i) b.set_weight(i, weight), b.set_gradient(i, gradient);
  if (format ==
      Format::eight_bit)  // a neighbour ten times as large, so that the codes are not used to the top
    for (int64_t i = 0; i < n; i += kScaleBlock) b.set_gradient(i, 10 * gradient);
  b = actual(kernels(), b, step, {0, n}, 0);
  Means sum{0, 0};
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (format == Format::eight_bit && i % kScaleBlock == 0) continue;
    sum.weight += b.weight(i);
    if (b.components.size() > 2) sum.state += b.state(0, i);
    ++count;
  }
  return {sum.weight / static_cast<double>(count), sum.state / static_cast<double>(count)};
}

TEST(StochasticRounding, IsUnbiased) {
  constexpr int64_t kCount = 1 << 18;
  const double deviations = 5 / std::sqrt(static_cast<double>(kCount));
  double worst = 0;
  for (int trial = 0; trial < 40; ++trial) {
    // The state becomes the gradient (Momentum's first step), which lies anywhere between two codes.
    const float gradient = std::ldexp(1 + 0.0247f * static_cast<float>(trial), trial % 7 - 9);
    const Step step{.hyper = MomentumConfig{.lr = 0}, .step = 1, .grad_scale = 1, .seed = 5u + trial};
    const double compact = means(step.hyper, Format::compact, 1.0f, gradient, kCount, step).state;
    EXPECT_NEAR(compact, gradient, gradient * 0x1p-7 * 0.5 * deviations) << "compact, trial " << trial;
    const double eight = means(step.hyper, Format::eight_bit, 1.0f, gradient, kCount, step).state;
    EXPECT_NEAR(eight, gradient, gradient * 0x1p-3 * 0.5 * deviations) << "8bit, trial " << trial;
    // The weight of 24 bits: a step of SGD far below its last bit.
    const float rate = 0x1p-19f * (1 + 0.09f * static_cast<float>(trial));
    const Step sgd{.hyper = SgdConfig{.lr = rate}, .step = 1, .grad_scale = 1, .seed = 7u + trial};
    const double weight = means(sgd.hyper, Format::eight_bit, 1.5f, 1.0f, kCount, sgd).weight;
    const double exact = 1.5f - rate;
    EXPECT_NEAR(weight, exact, 0x1p-15 * 0.5 * deviations) << "trial " << trial;
    worst = std::max(worst, std::abs(compact - gradient) / (gradient * 0x1p-7));
  }
  std::printf("%d elements a trial; compact's largest bias %.5f of a step\n", static_cast<int>(kCount),
              worst);
}

// A second moment in 8 bits whose elements are much smaller than their block's largest.
TEST(StochasticRounding, ASumOfSquaresIsUnbiasedAndNeverZero) {
  constexpr int64_t kCount = 1 << 18;
  for (int trial = 0; trial < 20; ++trial) {
    const float gradient = std::ldexp(1 + 0.05f * static_cast<float>(trial), -4);
    const Step step{.hyper = AdagradConfig{.lr = 0}, .step = 1, .grad_scale = 1, .seed = 50u + trial};
    const double want = static_cast<double>(gradient) * gradient;
    EXPECT_NEAR(means(step.hyper, Format::eight_bit, 1.0f, gradient, kCount, step).state, want,
                want * 0x1p-3 * 0.5 * 5 / std::sqrt(static_cast<double>(kCount)));
  }
  Bytes b(optimizer_named("adagrad"), Format::eight_bit, Element::fp32, kScaleBlock);
  for (int64_t i = 1; i < kScaleBlock; ++i) b.set_gradient(i, 1e-9f);
  b.set_gradient(0, 1e9f);
  b.set_gradient(7, 0.0f);
  b = actual(kernels(), b, {.hyper = AdagradConfig{}, .step = 1}, {0, kScaleBlock}, 0);
  for (int64_t i = 0; i < kScaleBlock; ++i) EXPECT_EQ(b.state(0, i) > 0, i != 7) << i;
}

TEST(StochasticRounding, DependsOnSeedStepAndElementOnly) {
  constexpr int64_t kCount = 4096;
  const auto codes = [](uint64_t seed, int64_t step, int64_t index) {
    Bytes b(optimizer_named("momentum"), Format::compact, Element::fp32, kCount);
    for (int64_t i = 0; i < kCount; ++i) b.set_gradient(i, 1.00390625f * 1.001f);
    const Step s{
        .hyper = MomentumConfig{.lr = 0}, .step = step, .grad_scale = 1, .seed = seed, .index = index};
    return actual(kernels(), b, s, {0, kCount}, 0).components[2];
  };
  const auto first = codes(1, 1, 0);
  EXPECT_EQ(codes(1, 1, 0), first);
  EXPECT_NE(codes(2, 1, 0), first);
  EXPECT_NE(codes(1, 2, 0), first);
  const auto later = codes(1, 1, 64);
  EXPECT_NE(later, first);
  EXPECT_TRUE(std::equal(later.begin(), later.end() - 128, first.begin() + 128));  // 64 elements on
}

// The fields of neighbours, of steps and of seeds: means, correlations, and the bits of a flipped input.
TEST(StochasticRounding, TheGeneratorMixes) {
  constexpr int kCount = 1 << 20;
  const double bound = 5 / std::sqrt(static_cast<double>(kCount));
  const auto draw = [](uint64_t seed, int index) { return reference_noise(seed, index, 0, 0); };
  const auto uniform = [](uint32_t x) { return x * 0x1p-32 - 0.5; };
  double mean = 0, square = 0, neighbour = 0, far = 0, other_seed = 0, halves = 0;
  std::vector<int> flips(32, 0), ones(32, 0);
  for (int i = 0; i < kCount; ++i) {
    const uint32_t x = draw(9, i);
    mean += uniform(x);
    square += uniform(x) * uniform(x);
    neighbour += uniform(x) * uniform(draw(9, i + 1));
    far += uniform(x) * uniform(draw(9, i + 4096));
    other_seed += uniform(x) * uniform(draw(10, i));
    halves += uniform(x << 16) * uniform(x & 0xFFFF0000u);
    const uint32_t flipped = x ^ draw(9, i ^ (1 << (i % 20)));
    for (size_t bit = 0; bit < 32; ++bit) flips[bit] += flipped >> bit & 1, ones[bit] += x >> bit & 1;
  }
  EXPECT_NEAR(mean / kCount, 0, bound * std::sqrt(1 / 12.0));
  EXPECT_NEAR(square / kCount, 1 / 12.0, bound / 12);
  for (const double product : {neighbour, far, other_seed, halves})
    EXPECT_NEAR(product / kCount, 0, bound / 12);
  for (size_t bit = 0; bit < 32; ++bit) {
    EXPECT_NEAR(ones[bit] / static_cast<double>(kCount), 0.5, bound * 0.5) << bit;
    EXPECT_NEAR(flips[bit] / static_cast<double>(kCount), 0.5, bound * 0.5) << bit;
  }
}

// Adam's second moment moves by a thousandth a step, far below a step of bf16 or of a code. Draws that are
// independent from step to step would add up to a random walk; the golden-ratio sequence spreads them evenly.
TEST(StochasticRounding, ErrorsDoNotAddUpOverSteps) {
  constexpr int64_t kCount = 2048;
  const Hyper hyper = AdamConfig{.lr = 0};
  const auto error = [&](Format format, bool one_seed) {
    Bytes b(optimizer_of(hyper), format, Element::fp32, kCount);
    std::vector<double> v(kCount, 0);
    for (int64_t step = 1; step <= 3000; ++step) {
      for (int64_t i = 0; i < kCount; ++i) {
        const auto g = static_cast<float>(1 + 0.5 * std::sin(0.37 * static_cast<double>(step) + 0.1 * i));
        b.set_gradient(i, g);
        v[static_cast<size_t>(i)] = 0.999 * v[static_cast<size_t>(i)] + 0.001 * g * g;
      }
      const auto seed = static_cast<uint64_t>(one_seed ? 1 : step);
      b = actual(kernels(), b, {.hyper = hyper, .step = step, .grad_scale = 1, .seed = seed}, {0, kCount}, 0);
    }
    double sum = 0;
    for (int64_t i = 0; i < kCount; ++i) sum += std::pow(b.state(1, i) / v[static_cast<size_t>(i)] - 1, 2);
    return std::sqrt(sum / kCount);
  };
  if (kFewer) GTEST_SKIP() << "3000 steps are for the release build";
  for (const Format format : {Format::compact, Format::eight_bit}) {
    const double even = error(format, true), independent = error(format, false);
    std::printf("%s: relative error of v after 3000 steps %.4f; with independent draws %.4f\n",
                std::string(name(format)).c_str(), even, independent);
    EXPECT_LT(even, 0.6 * independent);
  }
}

}  // namespace
}  // namespace overspill::optim
