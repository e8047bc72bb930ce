// Components, and values in and out of them.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cpu_optim/update.h"
#include "tests/cpu_optim/update_cases.h"

namespace overspill::optim {
namespace {

std::vector<std::byte*> pointers_of(Bytes& bytes) {
  std::vector<std::byte*> pointers;
  for (auto& component : bytes.components) pointers.push_back(component.data());
  return pointers;
}

std::string listed(std::string_view optimizer, Format format) {
  std::string text;
  for (const ComponentSpec& spec : components(optimizer_named(optimizer), format)) {
    text += std::string(spec.name) + " " + std::to_string(spec.bytes(1000)) + " ";
  }
  return text;
}

TEST(Components, AreWhatTheDesignSays) {
  EXPECT_EQ(listed("adam", Format::fp32), "p 4000 m 4000 v 4000 ");
  EXPECT_EQ(listed("adam", Format::exact), "hi 2000 lo 2000 m 4000 v 4000 ");
  EXPECT_EQ(listed("adam", Format::fp16), "p16 2000 master 4000 m 4000 v 4000 ");
  EXPECT_EQ(listed("adam", Format::compact), "hi 2000 lo 2000 m 2000 v 2000 ");
  EXPECT_EQ(listed("adam", Format::eight_bit), "hi 2000 lo 1000 m 1016 v 1016 ");
  EXPECT_EQ(listed("adagrad", Format::exact), "hi 2000 lo 2000 sum 4000 ");
  EXPECT_EQ(listed("lion", Format::compact), "hi 2000 lo 2000 m 2000 ");
  EXPECT_EQ(listed("momentum", Format::fp32), "p 4000 momentum_buffer 4000 ");
  EXPECT_EQ(listed("sgd", Format::eight_bit), "hi 2000 lo 1000 ");
  for (int i = 0; i < kOptimizerCount; ++i) {
    const Optimizer optimizer{static_cast<uint8_t>(i)};
    EXPECT_EQ(optimizer_named(name(optimizer)), optimizer);
    for (const Format format : kFormats) {
      EXPECT_EQ(format_named(name(format)), format);
      EXPECT_LE(components(optimizer, format).size(), static_cast<size_t>(kComponentsMax));
      EXPECT_EQ(components(optimizer, format)[0].role, Role::weight);
    }
  }
}

TEST(Values, WeightsComeBack) {
  constexpr int64_t kCount = 500;
  std::mt19937 random(1);
  for (const Format format : kFormats) {
    Bytes b(optimizer_named("adam"), format, Element::fp32, kCount);
    const auto pointers = pointers_of(b);
    const Piece piece{.components = pointers, .elements = kCount};
    std::vector<float> in(300), out(300);
    for (float& x : in) {
      const uint32_t bits = random();
      x = std::bit_cast<float>(format == Format::eight_bit ? bits & 0xFFFFFF00u : bits);
      if (std::isnan(x)) x = 1;
    }
    store_weights(b.optimizer, format, piece, {100, 400}, in);
    load_weights(b.optimizer, format, piece, {100, 400}, out);
    EXPECT_EQ(in, out) << name(format);
    for (int64_t i = 0; i < kCount; ++i)
      ASSERT_EQ(b.weight(i), i >= 100 && i < 400 ? in[static_cast<size_t>(i - 100)] : 0) << name(format);
    EXPECT_THROW(load_weights(b.optimizer, format, piece, {100, 401}, out), std::invalid_argument);
  }
}

TEST(Values, EightBitWeightsAreRoundedToTheNearest) {
  Bytes b(optimizer_named("sgd"), Format::eight_bit, Element::fp32, 3);
  const auto pointers = pointers_of(b);
  const std::vector<float> in{1 + 0x1p-16f, 1 + 0x1p-17f, -3 - 0x1.8p-15f};
  store_weights(b.optimizer, b.format, {.components = pointers, .elements = 3}, {0, 3}, in);
  EXPECT_EQ(b.weight(0), 1 + 0x1p-15f);
  EXPECT_EQ(b.weight(1), 1.0f);
  EXPECT_EQ(b.weight(2), -3 - 0x1p-14f);
}

TEST(Values, StatesComeBackWithinAStepOfTheirFormat) {
  constexpr int64_t kCount = 200;
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (const Format format : kFormats) {
    Bytes b(optimizer_named("adam"), format, Element::fp32, kCount);
    const auto pointers = pointers_of(b);
    const Piece piece{.components = pointers, .elements = kCount};
    for (int state = 0; state < 2; ++state) {
      std::vector<float> in(kCount), out(kCount), again(kCount);
      for (float& x : in) x = state == 0 ? normal(random) : std::abs(normal(random));
      in[5] = 0;
      store_state(b.optimizer, format, piece, {0, kCount}, state, in);
      load_state(b.optimizer, format, piece, {0, kCount}, state, out);
      const float step = format == Format::compact ? 0x1p-8f : format == Format::eight_bit ? 0x1p-5f : 0;
      for (size_t i = 0; i < in.size(); ++i) {
        ASSERT_NEAR(out[i], in[i], std::abs(in[i]) * step + (step > 0.01f ? 0x1p-9f : 0)) << name(format);
        ASSERT_EQ(out[i], b.state(state, static_cast<int64_t>(i))) << name(format) << " " << i;
      }
      store_state(b.optimizer, format, piece, {0, kCount}, state, out);
      load_state(b.optimizer, format, piece, {0, kCount}, state, again);
      EXPECT_EQ(again, out) << name(format);  // what is on a code stays there
    }
    EXPECT_THROW(load_state(b.optimizer, format, piece, {0, 0}, 2, {}), std::invalid_argument);
  }
}

TEST(Values, WhatWasRoundedDownStaysOnTheCodesOfItsScale) {
  // 124 of 2 rounds down to 123, which fits a scale of 1 too: 33 is a code of the former alone.
  for (const bool is_signed : {true, false}) {
    Bytes b(optimizer_named("adam"), Format::eight_bit, Element::fp32, 64);
    const auto pointers = pointers_of(b);
    const Piece piece{.components = pointers, .elements = 64};
    const int state = is_signed ? 0 : 1;
    std::vector<float> in(64), out(64), again(64);
    in[0] = is_signed ? 2 * 124.0f : 2 * 32000.0f;
    in[1] = 2 * 17.0f - 1;
    store_state(b.optimizer, b.format, piece, {0, 64}, state, in);
    load_state(b.optimizer, b.format, piece, {0, 64}, state, out);
    ASSERT_LT(out[0], in[0]) << "not the case that is meant";
    store_state(b.optimizer, b.format, piece, {0, 64}, state, out);
    load_state(b.optimizer, b.format, piece, {0, 64}, state, again);
    EXPECT_EQ(again, out) << is_signed;
  }
}

TEST(Values, ABlockIsStoredWhole) {
  Bytes b(optimizer_named("lion"), Format::eight_bit, Element::fp32, 200);
  const auto pointers = pointers_of(b);
  const Piece piece{.components = pointers, .elements = 200};
  const std::vector<float> in(72, 1.0f);
  EXPECT_THROW(store_state(b.optimizer, b.format, piece, {0, 72}, 0, in), std::invalid_argument);
  EXPECT_THROW(store_state(b.optimizer, b.format, piece, {32, 104}, 0, in), std::invalid_argument);
  store_state(b.optimizer, b.format, piece, {128, 200}, 0, in);
  EXPECT_NEAR(b.state(0, 199), 1.0f, 0x1p-5f);
}

TEST(Values, AdagradStartsWithItsAccumulator) {
  for (const Format format : kFormats) {
    Bytes b(optimizer_named("adagrad"), format, Element::fp32, 5000);
    const auto pointers = pointers_of(b);
    initialize_states(AdagradConfig{.initial_accumulator_value = 0.5}, format,
                      {.components = pointers, .elements = 5000});
    for (int64_t i = 0; i < 5000; ++i) ASSERT_NEAR(b.state(0, i), 0.5, 1e-4) << name(format);
  }
}

}  // namespace
}  // namespace overspill::optim
