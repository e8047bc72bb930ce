#include "cpu_optim/blockwise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "cpu_optim/gradient.h"

namespace overspill::optim {
namespace {

std::vector<float> random_values(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, 0.02F);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(generator);
  return values;
}

std::vector<std::byte> packed(Packing packing, const std::vector<float>& values) {
  std::vector<std::byte> out(static_cast<size_t>(packed_bytes(packing, Element::fp32, std::ssize(values))));
  pack(packing, Element::fp32, std::as_bytes(std::span(values)), out);
  return out;
}

std::vector<float> unpacked(Packing packing, const std::vector<std::byte>& bytes, size_t count) {
  std::vector<float> out(count);
  unpack(packing, Element::fp32, bytes, std::as_writable_bytes(std::span(out)));
  return out;
}

TEST(Blockwise, SizesAreThoseOfTheHeader) {
  EXPECT_EQ(packed_bytes(Packing::nf4, Element::bf16, 64), 34);
  EXPECT_EQ(packed_bytes(Packing::nf4, Element::fp32, 65), 72);
  EXPECT_EQ(packed_bytes(Packing::int8, Element::bf16, 128), 132);
  EXPECT_EQ(packed_bytes(Packing::int8, Element::fp32, 0), 0);
}

TEST(Blockwise, EachPointOfTheTableIsKept) {
  // A block that has all 16 points of nf4, which are symmetric at the ends alone.
  const std::vector<float> points = {
      -1.0F,       -0.69619280F, -0.52507305F, -0.39491749F, -0.28444138F, -0.18477343F, -0.09105004F, 0.0F,
      0.07958030F, 0.16093020F,  0.24611230F,  0.33791524F,  0.44070983F,  0.56261700F,  0.72295684F,  1.0F};
  const std::vector<std::byte> bytes = packed(Packing::nf4, points);
  for (size_t i = 0; i < points.size(); i += 2)
    EXPECT_EQ(std::to_integer<int>(bytes[i / 2]), static_cast<int>(i << 4 | (i + 1)));
  const std::vector<float> back = unpacked(Packing::nf4, bytes, points.size());
  for (size_t i = 0; i < points.size(); ++i) EXPECT_FLOAT_EQ(back[i], points[i]);
}

TEST(Blockwise, WhatIsUnpackedPacksToTheSameBytes) {
  for (const Packing packing : {Packing::nf4, Packing::int8}) {
    for (int64_t count = 1; count <= 4200; count = count < 200 ? count + 1 : count * 3 + 1) {
      const std::vector<float> values = random_values(count, static_cast<unsigned>(count));
      const std::vector<std::byte> bytes = packed(packing, values);
      const std::vector<float> back = unpacked(packing, bytes, values.size());
      EXPECT_EQ(packed(packing, back), bytes) << count;
      for (size_t begin = 0; begin < values.size(); begin += kPackingBlock) {
        const size_t end = std::min(values.size(), begin + kPackingBlock);
        float largest = 0;
        for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
        // The widest gap of nf4 is from -1 to -0.696.
        const float most = packing == Packing::nf4 ? 0.1520F * largest : 0.5001F / 127 * largest;
        for (size_t i = begin; i < end; ++i) {
          EXPECT_LE(std::abs(back[i] - values[i]), most);
          if (std::abs(values[i]) == largest) {
            EXPECT_EQ(back[i], values[i]);
          }
        }
      }
    }
  }
}

TEST(Blockwise, Bf16RoundsTheProductOnce) {
  const std::vector<float> wide = random_values(1000, 7);
  std::vector<uint16_t> values(wide.size());
  narrow(wide, values);
  for (const Packing packing : {Packing::nf4, Packing::int8}) {
    std::vector<std::byte> bytes(static_cast<size_t>(packed_bytes(packing, Element::bf16, 1000)));
    pack(packing, Element::bf16, std::as_bytes(std::span(values)), bytes);
    std::vector<uint16_t> back(values.size());
    unpack(packing, Element::bf16, bytes, std::as_writable_bytes(std::span(back)));
    std::vector<float> rounded(wide.size());
    widen(values, rounded);  // the same weights in fp32, whose magnitudes are the same
    const std::vector<float> exact = unpacked(packing, packed(packing, rounded), rounded.size());
    std::vector<uint16_t> wanted(exact.size());
    narrow(exact, wanted);
    EXPECT_EQ(back, wanted);
  }
}

TEST(Blockwise, WrongSizesTypesAndValuesAreRefused) {
  std::vector<float> values(65, 1.0F);
  std::vector<std::byte> bytes(static_cast<size_t>(packed_bytes(Packing::int8, Element::fp32, 65)));
  const auto given = std::as_bytes(std::span(values));
  const auto out = std::as_writable_bytes(std::span(values));
  EXPECT_THROW(pack(Packing::int8, Element::fp32, given, std::span(bytes).first(bytes.size() - 1)),
               std::invalid_argument);
  EXPECT_THROW(unpack(Packing::nf4, Element::fp32, bytes, out), std::invalid_argument);
  EXPECT_THROW(pack(Packing::int8, Element::fp32, given.first(given.size() - 1), bytes),
               std::invalid_argument);
  EXPECT_THROW(pack(Packing::int8, Element::fp16, given, bytes), std::invalid_argument);
  values[64] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THROW(pack(Packing::int8, Element::fp32, given, bytes), std::invalid_argument);
  EXPECT_THROW(packing_named("nf3"), std::invalid_argument);
}

}  // namespace
}  // namespace overspill::optim
