// The update, bit for bit against the scalar reference: every count and misalignment, every form, every
// optimizer, every format.
#include "cpu_optim/update.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu_optim/split.h"
#include "tests/cpu_optim/guarded.h"
#include "tests/cpu_optim/update_cases.h"

namespace overspill::optim {
namespace {

void check(const Kernels& form, const Bytes& start, const Bytes& want, const Step& step, Range range,
           int offset) {
  const Bytes got = actual(form, start, step, range, offset);
  ASSERT_EQ(difference(got, want), "") << describe(form, start, range, offset);
}

/// Every form against the reference; returns how many comparisons that was.
int64_t check_all_forms(const Bytes& start, const Step& step, Range range, std::span<const int> offsets) {
  const Bytes want = expected(start, step, range);
  int64_t cases = 0;
  for (const Kernels* form : available_kernels()) {
    for (const int offset : offsets) {
      check(*form, start, want, step, range, offset);
      ++cases;
    }
  }
  return cases;
}

template <class Visit>
void for_each_kind(Visit visit) {
  for (const Hyper& hyper : all_hypers()) {
    for (const Format format : kFormats) {
      for (const Element element : kElements) {
        visit(hyper, format, element);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

class UpdateOf : public testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(Formats, UpdateOf, testing::ValuesIn(kFormats),
                         [](const auto& format) { return std::string(name(format.param)); });

// 0 to 2 N + 1 of the widest vectors; for 8 bits, whose vectors are blocks of 64, to two blocks and one.
TEST_P(UpdateOf, EveryCountMisalignmentFormAndOptimizer) {
  const Format format = GetParam();
  constexpr int kEvery[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, kFew[] = {0, 5};
  const int64_t last = format == Format::eight_bit ? 2 * kScaleBlock + 1 : 2 * kFormsLanesMax + 1;
  int64_t cases = 0;
  for (const Hyper& hyper : all_hypers()) {
    for (const Element element : kElements) {
      for (int64_t n = 0; n <= last; ++n) {
        const Bytes start = random_bytes(optimizer_of(hyper), format, element, n, static_cast<uint32_t>(n));
        const bool every = !kFewer && (n <= 2 * kFormsLanesMax + 1 || n % kScaleBlock <= 1);
        cases += check_all_forms(start, {.hyper = hyper}, {0, n},
                                 every ? std::span<const int>(kEvery) : std::span<const int>(kFew));
        ASSERT_FALSE(HasFailure());
      }
    }
  }
  std::printf("%lld cases\n", static_cast<long long>(cases));
}

TEST_P(UpdateOf, RangesInsideAPieceLeaveTheRestAlone) {
  const Format format = GetParam();
  std::mt19937 random(5);
  int64_t cases = 0;
  for (const Hyper& hyper : all_hypers()) {
    for (int round = 0; round < (kFewer ? 20 : 100); ++round) {
      const int64_t n = 1 + random() % 300, begin = random() % n, end = begin + random() % (n - begin + 1);
      const Bytes start = random_bytes(optimizer_of(hyper), format, kElements[round % 3], n, random());
      const int offsets[] = {static_cast<int>(random() % 16)};
      cases += check_all_forms(start, {.hyper = hyper, .index = 64 * static_cast<int64_t>(random())},
                               {begin, end}, offsets);
      ASSERT_FALSE(HasFailure());
    }
  }
  std::printf("%lld cases\n", static_cast<long long>(cases));
}

TEST_P(UpdateOf, ManyValues) {
  const int64_t n = kFewer ? 5'003 : 100'003;
  constexpr int kOffsets[] = {1, 2};  // and both ways to prefetch
  for (const Hyper& hyper : all_hypers()) {
    const Bytes start = random_bytes(optimizer_of(hyper), GetParam(), Element::fp32, n, 42);
    check_all_forms(start, {.hyper = hyper}, {0, n}, kOffsets);
    ASSERT_FALSE(HasFailure());
  }
}

TEST_P(UpdateOf, EveryCombinationOfSpecialValues) {
  using Limits = std::numeric_limits<float>;
  constexpr float kAny[] = {0.0f,
                            -0.0f,
                            1.0f,
                            -1.5f,
                            Limits::denorm_min(),
                            -Limits::denorm_min(),
                            Limits::min(),
                            1e-30f,
                            Limits::max(),
                            Limits::lowest(),
                            Limits::infinity(),
                            -Limits::infinity(),
                            Limits::quiet_NaN(),
                            std::bit_cast<float>(0x7FFFFFFFu)};  // poison: the NaN that a carry would make -0
  constexpr int kOffsets[] = {0};
  constexpr int64_t kCount = std::size(kAny), kCombinations = kCount * kCount * kCount;
  // Weights and gradients in every combination; states are those that one step from zero leaves behind in the
  // combination of the next element. In 8 bits a block each, because a value that is not finite takes its
  // whole block along.
  const int64_t apart = GetParam() == Format::eight_bit ? kScaleBlock : 1;
  for (const Hyper& hyper : all_hypers()) {
    for (const Element element : kElements) {
      const int64_t n = kCombinations * apart;
      Bytes start(optimizer_of(hyper), GetParam(), element, n);
      for (int64_t i = 0; i < n; ++i) start.set_gradient(i, kAny[i / apart / kCount / kCount]);
      start = expected(start, {.hyper = hyper, .step = 1, .grad_scale = 1}, {0, n});
      for (int64_t i = 0; i < n; ++i) {
        start.set_weight(i, kAny[i / apart % kCount]);
        start.set_gradient(i, kAny[i / apart / kCount % kCount]);
      }
      check_all_forms(start, {.hyper = hyper, .step = 2}, {0, n}, kOffsets);
      ASSERT_FALSE(HasFailure());
    }
  }
  std::printf("%lld combinations\n", static_cast<long long>(kCombinations));
}

// Spelled out, so that kernels and reference cannot be wrong together.
TEST(Update, SpecialGradientsGiveTheBitsTheyShould) {
  using Limits = std::numeric_limits<float>;
  const AdamConfig adam{.lr = 0.5, .beta1 = 0.5, .beta2 = 0.75, .eps = 0};
  struct Row {
    float gradient;
    uint32_t weight, m, v;  // after the first step from weight 1
  };
  const Row rows[] = {
      {0.0f, 0x7FC00000u, 0, 0},                      // 0 / 0 with eps 0
      {2.0f, 0x3F000000u, 0x3F800000u, 0x3F800000u},  // 1 - 0.5 * 1
      {-2.0f, 0x3FC00000u, 0xBF800000u, 0x3F800000u},
      {Limits::max(), 0x3F800000u, 0x7EFFFFFFu, 0x7F800000u},  // v overflows: m / inf
      {Limits::infinity(), 0x7FC00000u, 0x7F800000u, 0x7F800000u},
      {Limits::quiet_NaN(), 0x7FC00000u, 0x7FC00000u, 0x7FC00000u},
  };
  for (const Kernels* form : available_kernels()) {
    for (const Row& row : rows) {
      Bytes b(optimizer_of(adam), Format::fp32, Element::fp32, 1);
      b.set_weight(0, 1.0f);
      b.set_gradient(0, row.gradient);
      b = actual(*form, b, {.hyper = adam, .step = 1, .grad_scale = 1}, {0, 1}, 0);
      EXPECT_TRUE(same(b.weight(0), std::bit_cast<float>(row.weight))) << form->name << " " << row.gradient;
      EXPECT_TRUE(same(b.state(0, 0), std::bit_cast<float>(row.m))) << form->name << " " << row.gradient;
      EXPECT_TRUE(same(b.state(1, 0), std::bit_cast<float>(row.v))) << form->name << " " << row.gradient;
    }
    // A denormal gradient is not flushed: Lion takes its sign, and keeps a quarter of it.
    const LionConfig lion{.lr = 0.25, .beta1 = 0.5, .beta2 = 0.75};
    Bytes b(optimizer_of(Hyper(lion)), Format::exact, Element::fp32, 1);
    b.set_weight(0, 1.0f);
    b.set_gradient(0, -0x1p-140f);
    b = actual(*form, b, {.hyper = lion, .step = 1, .grad_scale = 1}, {0, 1}, 0);
    EXPECT_EQ(b.weight(0), 1.25f) << form->name;
    EXPECT_EQ(b.state(0, 0), -0x1p-142f) << form->name;
    // Neither zero nor NaN has a sign.
    for (const float none : {0.0f, -0.0f, Limits::quiet_NaN()}) {
      Bytes c(optimizer_of(Hyper(lion)), Format::exact, Element::fp32, 1);
      c.set_weight(0, 1.0f);
      c.set_gradient(0, none);
      c = actual(*form, c, {.hyper = lion, .step = 1, .grad_scale = 1}, {0, 1}, 0);
      EXPECT_EQ(c.weight(0), 1.0f) << form->name;
    }
  }
}

// Where a fused multiply-add by way of double is one rounding too many. With l2 * p = 2^-24 (1 - 2^-46) and
// an odd gradient 1 + 2^-23, the sum is so near the middle of two floats that double rounds it onto the
// middle. beta1 = 0 and m = 0 show the sum as m. Random values meet this about once in 2^29.
TEST(Update, SumsNextToTheMiddleOfTwoFloatsAreRoundedOnce) {
  const AdamConfig config{.beta1 = 0, .weight_decay = 1 - 0x1p-23, .decoupled = false};
  const Step step{.hyper = config, .step = 1, .grad_scale = 1};
  constexpr int kOffsets[] = {0};
  for (const Format format : {Format::fp32, Format::exact}) {
    Bytes start(optimizer_of(step.hyper), format, Element::fp32, 64);
    for (int i = 0; i < 64; ++i) {
      const float size = std::ldexp(1.0f, i / 4 - 8);
      start.set_weight(i, (i % 2 == 0 ? 1 : -1) * size * (1 + 0x1p-23f) * 0x1p-24f);
      start.set_gradient(i, (i / 2 % 2 == 0 ? 1 : -1) * size * (1 + 0x1p-23f));
    }
    EXPECT_EQ(expected(start, step, {0, 64}).state(0, 32), 1 + 0x1p-23f);  // not 1 + 2^-22
    check_all_forms(start, step, {0, 64}, kOffsets);
  }
}

TEST(Update, SpecialHyperParametersAndSteps) {
  constexpr int kOffsets[] = {2};
  const int64_t many = (int64_t{1} << 24) + 12'345;
  const std::vector<Step> steps{{.hyper = AdamConfig{.lr = 0}},
                                {.hyper = AdamConfig{.lr = 0, .weight_decay = 0.1, .decoupled = false}},
                                {.hyper = AdamConfig{.beta1 = 0, .beta2 = 0, .eps = 0}},
                                {.hyper = AdamConfig{.eps = 1e-15}},
                                {.hyper = AdamConfig{}, .step = 2, .grad_scale = 0x1p-16},
                                {.hyper = AdamConfig{}, .step = 2, .grad_scale = 0},
                                {.hyper = AdagradConfig{.lr = 0}},
                                {.hyper = AdagradConfig{.lr_decay = 0.5, .eps = 0}, .step = 1},
                                {.hyper = LionConfig{.lr = 0, .weight_decay = 0.5}},
                                {.hyper = LionConfig{.beta1 = 0, .beta2 = 0}, .step = 1},
                                {.hyper = MomentumConfig{.lr = 0}},
                                {.hyper = MomentumConfig{.dampening = 0.5, .nesterov = true}, .step = 1},
                                {.hyper = SgdConfig{.lr = 0, .weight_decay = 0.5}}};
  for (const Format format : kFormats) {
    for (Step step : steps) {
      const Bytes start = random_bytes(optimizer_of(step.hyper), format, Element::bf16, 333, 7);
      for (const int64_t at : {step.step, many, int64_t{1'000'000'000'000}}) {
        step.step = at;
        check_all_forms(start, step, {0, 333}, kOffsets);
        ASSERT_FALSE(HasFailure()) << "step " << at;
      }
    }
  }
}

TEST(Update, ALearningRateOfZeroLeavesExactWeightsAlone) {
  for_each_kind([](const Hyper& hyper, Format format, Element element) {
    if (format == Format::compact || format == Format::eight_bit) return;
    Hyper still = hyper;
    std::visit([](auto& c) { c.lr = 0; }, still);
    Bytes start(optimizer_of(hyper), format, element, 40);
    for (int i = 0; i < 40; ++i) {
      start.set_weight(i, 0.1f * static_cast<float>(i) - 2);
      start.set_gradient(i, 0.3f);
    }
    const Bytes end = actual(kernels(), start, {.hyper = still}, {0, 40}, 0);
    for (int i = 0; i < 40; ++i) ASSERT_EQ(end.weight(i), start.weight(i));
  });
}

// The claim of the exact format, over many steps and for all optimizers: fp32 on the same gradients, then the
// split.
TEST(Update, ExactIsFp32FollowedByTheSplit) {
  constexpr int64_t kCount = 1021;
  for (const Hyper& hyper : all_hypers()) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    Bytes exact(optimizer_of(hyper), Format::exact, Element::bf16, kCount);
    Bytes fp32(optimizer_of(hyper), Format::fp32, Element::bf16, kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      const float w = normal(random);
      exact.set_weight(i, w), fp32.set_weight(i, w);
    }
    for (int64_t step = 1; step <= 100; ++step) {
      for (int64_t i = 0; i < kCount; ++i) {
        const float g = normal(random);
        exact.set_gradient(i, g), fp32.set_gradient(i, g);
      }
      exact = actual(kernels(), exact, {.hyper = hyper, .step = step}, {0, kCount}, 3);
      fp32 = actual(kernels(), fp32, {.hyper = hyper, .step = step}, {0, kCount}, 8);
    }
    for (int64_t i = 0; i < kCount; ++i) {
      const auto bits = std::bit_cast<uint32_t>(fp32.weight(i));
      uint16_t hi;
      std::memcpy(&hi, &exact.components[0][static_cast<size_t>(i) * 2], 2);
      ASSERT_EQ(hi, split_hi(bits)) << name(exact.optimizer);
      ASSERT_EQ(std::bit_cast<uint32_t>(exact.weight(i)), bits) << name(exact.optimizer);
    }
    for (size_t k = 1; k < fp32.components.size(); ++k)
      ASSERT_EQ(fp32.components[k], exact.components[k + 1]);
  }
}

TEST(Update, ManyStepsAgreeBetweenForms) {
  for (const Hyper& hyper : all_hypers()) {
    for (const Format format : kFormats) {
      const Bytes start = random_bytes(optimizer_of(hyper), format, Element::bf16, 333, 9);
      std::vector<Bytes> ends;
      for (const Kernels* form : available_kernels()) {
        Bytes b = start;
        for (int64_t step = 1; step <= 30; ++step)
          b = actual(*form, b, {.hyper = hyper, .step = step}, {0, 333}, 3);
        ends.push_back(b);
        ASSERT_EQ(difference(ends.back(), ends.front()), "") << describe(*form, b, {0, 333}, 3);
      }
    }
  }
}

TEST(Update, ReadsNothingPastTheEnd) {
  for_each_kind([](const Hyper& hyper, Format format, Element element) {
    for (int64_t n = 0; n <= 2 * kFormsLanesMax + 1; ++n) {
      const Step step{.hyper = hyper};
      const Bytes start = random_bytes(optimizer_of(hyper), format, element, n, 5);
      const Bytes want = expected(start, step, {0, n});
      const Factors factors = make_factors(hyper, step.step, step.grad_scale);
      std::vector<std::unique_ptr<AtPageEnd<std::byte>>> memory;
      std::vector<std::byte*> pointers;
      for (const auto& component : start.components) {
        memory.push_back(std::make_unique<AtPageEnd<std::byte>>(component));
        pointers.push_back(memory.back()->data());
      }
      AtPageEnd<std::byte> gradient(start.gradient);
      update(format, {.components = pointers, .elements = n, .seed = step.seed}, {gradient.data(), element},
             {0, n}, factors);
      Bytes end = start;
      for (size_t c = 0; c < pointers.size(); ++c)
        std::copy(pointers[c], pointers[c] + end.components[c].size(), end.components[c].begin());
      ASSERT_EQ(difference(end, want), "") << describe(kernels(), start, {0, n}, 0);
    }
  });
}

// The noise has the index's upper half in its key; a range that crosses over is cut there.
TEST(Update, IndicesBeyondTwoToThe32) {
  for (const Format format : {Format::compact, Format::eight_bit}) {
    for (const int64_t index : {int64_t{1} << 32, (int64_t{1} << 32) - 128, (int64_t{7} << 32) - 192}) {
      const Step step{.hyper = AdamConfig{}, .index = index};
      Bytes b = random_bytes(optimizer_of(step.hyper), format, Element::bf16, 300, 4);
      const Bytes want = expected(b, step, {5, 290});
      std::vector<std::byte*> pointers;
      for (auto& component : b.components) pointers.push_back(component.data());
      update(format, {.components = pointers, .elements = 300, .index = index, .seed = step.seed},
             {b.gradient.data(), Element::bf16}, {5, 290},
             make_factors(step.hyper, step.step, step.grad_scale));
      EXPECT_EQ(difference(b, want), "") << name(format) << " index " << index;
    }
  }
}

TEST(Update, MistakesThrowAndWriteNothing) {
  const Factors factors = make_factors(AdamConfig{}, 1, 1.0);
  const Optimizer adam = optimizer_named("adam");
  Bytes b = random_bytes(adam, Format::eight_bit, Element::bf16, 100, 3);
  const Bytes start = b;
  std::vector<std::byte*> p;
  for (auto& component : b.components) p.push_back(component.data());
  const Gradient gradient{b.gradient.data(), Element::bf16};
  const auto fails = [&](const Piece& piece, Gradient g, Range range, const char* says) {
    try {
      update(Format::eight_bit, piece, g, range, factors);
      ADD_FAILURE() << "no error; expected one that says " << says;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
    }
  };
  std::vector<std::byte*> missing = p, empty = p;
  missing.pop_back();
  empty[3] = nullptr;
  fails({.components = missing, .elements = 100}, gradient, {0, 100}, "3 components");
  fails({.components = empty, .elements = 100}, gradient, {0, 100}, "component v has no memory");
  fails({.components = p, .elements = 100}, gradient, {0, 101}, "0 to 101");
  fails({.components = p, .elements = 100}, gradient, {-1, 5}, "-1 to 5");
  fails({.components = p, .elements = 100}, gradient, {6, 5}, "6 to 5");
  fails({.components = p, .elements = 100, .index = 32}, gradient, {0, 5}, "no multiple of 64");
  fails({.components = p, .elements = 100, .index = -64}, gradient, {0, 5}, "index is -64");
  fails({.components = p, .elements = 100}, {nullptr, Element::bf16}, {0, 5}, "no gradient");
  EXPECT_EQ(b.components, start.components);
  EXPECT_THROW(make_factors(AdamConfig{}, 0, 1.0), std::invalid_argument);
  EXPECT_THROW(optimizer_named("adan"), std::invalid_argument);
  EXPECT_THROW(format_named("int4"), std::invalid_argument);
}

}  // namespace
}  // namespace overspill::optim
