// Weights in twelve bits and in eight. What twelve bits give back is what was coded, and a product of coded
// weights is that of bf16, bit for bit, in every form; eight bits against scalar loops in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "inference/kernels/coded.h"
#include "inference/kernels/forms.h"
#include "inference/kernels/int8.h"
#include "tests/cpu_optim/guarded.h"
#include "tests/inference/bf16.h"

namespace overspill::inference {
namespace {

using optim::Guarded;
using optim::GuardedBytes;

const int64_t kWidths[] = {2, 4, 6, 16, 30, 32, 34, 62, 64, 66, 130, 254, 256, 258, 576};

/// The same bits; of a NaN the payload is that of either factor, as the compiler orders them.
bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

/// The element of column c and row r in a panel of bf16.
size_t place(int64_t c, int64_t r) {
  return static_cast<size_t>(c / 2 * 2 * kPanelRows + 2 * r + c % 2);
}

std::vector<uint16_t> gaussian(std::mt19937& random, int64_t n) {
  std::normal_distribution<float> draw(0, 0.02f);
  std::vector<uint16_t> made(static_cast<size_t>(n));
  for (uint16_t& x : made) x = to_bf16(draw(random));
  return made;
}

/// A panel whose high bytes are 16, but for `odd` elements, which have others.
std::vector<uint16_t> with_odd_ones(std::mt19937& random, int64_t columns, int64_t odd) {
  std::vector<uint16_t> panel(static_cast<size_t>(kPanelRows * columns));
  for (size_t i = 0; i < panel.size(); ++i)
    panel[i] = static_cast<uint16_t>((0x38 + i % 8) << 8 | (i / 8 % 2) << 15 | random() % 256);
  std::vector<size_t> order(panel.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::shuffle(order, random);
  if (odd >= 2) std::swap(order[0], *std::ranges::find(order, size_t{0}));
  if (odd >= 2) std::swap(order[1], *std::ranges::find(order, panel.size() - 1));
  for (int64_t i = 0; i < odd; ++i) {
    // Infinities and NaNs with every payload, zeros of both signs, denormals.
    const uint16_t strange[] = {0x7F80, 0xFF80, 0x7FFF, 0xFFC1, 0x7F81, 0x0000, 0x8000, 0x0001, 0x807F};
    panel[order[static_cast<size_t>(i)]] = strange[random() % std::size(strange)];
  }
  return panel;
}

void expect_same_bits(const std::vector<uint16_t>& panel, int64_t columns) {
  GuardedBytes coded(std::vector<std::byte>(static_cast<size_t>(coded_panel_bytes(columns))), 0);
  ASSERT_TRUE(code_panel(panel.data(), columns, coded.data()));
  ASSERT_TRUE(coded.intact());
  std::vector<float> row(static_cast<size_t>(columns));
  for (int64_t r = 0; r < kPanelRows; ++r) {
    decode_row(coded.data(), columns, r, row.data());
    for (int64_t c = 0; c < columns; ++c) {
      ASSERT_EQ(std::bit_cast<uint32_t>(row[static_cast<size_t>(c)]),
                static_cast<uint32_t>(panel[place(c, r)]) << 16)
          << "row " << r << " column " << c;
    }
  }
}

TEST(Coded, GivesBackEveryNumberOfSixteenBits) {
  for (uint32_t first = 0; first < 0x10000; first += 4096) {
    std::vector<uint16_t> panel(4096);
    for (uint32_t i = 0; i < 4096; ++i) panel[i] = static_cast<uint16_t>(first + i * 1237 % 4096);
    expect_same_bits(panel, 64);
  }
}

TEST(Coded, GivesBackWhatDoesNotFitTheTable) {
  std::mt19937 random(1);
  for (const int64_t columns : kWidths) {
    for (const int64_t odd : {int64_t{0}, int64_t{1}, coded_patches_max(columns)}) {
      if (odd <= coded_patches_max(columns)) expect_same_bits(with_odd_ones(random, columns, odd), columns);
    }
  }
  for (const uint16_t value : {0x0000, 0x8000, 0x7FC1, 0x0001, 0x3F80})
    expect_same_bits(std::vector<uint16_t>(kPanelRows * 6, value), 6);
  // Columns in pairs, of which the last has one.
  std::vector<uint16_t> odd = gaussian(random, kPanelRows * 8);
  for (int64_t r = 0; r < kPanelRows; ++r) odd[place(7, r)] = 0;
  expect_same_bits(odd, 7);
}

TEST(Coded, SaysWhereAPanelDoesNotFit) {
  std::vector<uint16_t> all(0x10000);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<std::byte> to(static_cast<size_t>(coded_panel_bytes(1024)));
  EXPECT_FALSE(code_panel(all.data(), 1024, to.data()));
  std::mt19937 random(2);
  const int64_t most = coded_patches_max(64);
  std::vector<uint16_t> panel = with_odd_ones(random, 64, 0);
  // Each of another high byte, so that none of them is common.
  const auto spoil = [&](int64_t i) { panel[static_cast<size_t>(i * 7)] = static_cast<uint16_t>(i << 8); };
  for (int64_t i = 0; i < most; ++i) spoil(i);
  expect_same_bits(panel, 64);
  spoil(most);
  EXPECT_FALSE(code_panel(panel.data(), 64, to.data()));
}

class Format : public testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels() { return *GetParam(); }
  std::mt19937 random_{3};
};

TEST_P(Format, ProductsOfCodedWeightsAreThoseOfBf16) {
  for (const int64_t columns : kWidths) {
    const int64_t x_stride = columns + 3, out_stride = kPanelRows + 5;
    const auto x = gaussian(random_, 14 * x_stride);
    for (const auto& panel : {gaussian(random_, kPanelRows * columns),
                              with_odd_ones(random_, columns, coded_patches_max(columns))}) {
      std::vector<std::byte> coded(static_cast<size_t>(coded_panel_bytes(columns)));
      if (!code_panel(panel.data(), columns, coded.data())) continue;  // few columns leave no room
      for (int64_t vectors = 1; vectors <= 14; vectors += columns > 100 ? 3 : 1) {
        const int offset = static_cast<int>((vectors + columns / 2) % 16);
        GuardedBytes weights(coded, 4 * offset);
        Guarded<uint16_t> inputs(x, offset);
        const auto empty = std::vector<float>(static_cast<size_t>((vectors - 1) * out_stride + kPanelRows));
        Guarded<float> wanted(empty, 0), found(empty, offset);
        kernels().multiply_bf16(panel.data(), inputs.data(), x_stride, columns, wanted.data(), out_stride,
                                vectors);
        kernels().multiply_coded(weights.data(), inputs.data(), x_stride, columns, found.data(), out_stride,
                                 vectors);
        ASSERT_TRUE(found.intact());
        for (size_t i = 0; i < empty.size(); ++i)
          ASSERT_PRED2(same, found.data()[i], wanted.data()[i])
              << "row " << i % static_cast<size_t>(out_stride) << " columns " << columns << " vectors "
              << vectors;
      }
    }
  }
}

TEST_P(Format, ProductsOfEveryNumberAreThoseOfBf16) {
  for (uint32_t first = 0; first < 0x10000; first += 4096) {
    std::vector<uint16_t> panel(4096);
    for (uint32_t i = 0; i < 4096; ++i) panel[i] = static_cast<uint16_t>(first + i);
    std::vector<std::byte> coded(static_cast<size_t>(coded_panel_bytes(64)));
    ASSERT_TRUE(code_panel(panel.data(), 64, coded.data()));
    // Two columns count at a time, so that a row whose other columns are finite shows each number.
    for (int64_t c = 0; c < 64; c += 2) {
      std::vector<uint16_t> one(64);
      one[static_cast<size_t>(c)] = 0x3F80;
      one[static_cast<size_t>(c + 1)] = 0xBE80;
      std::vector<float> wanted(kPanelRows), found(kPanelRows);
      kernels().multiply_bf16(panel.data(), one.data(), 64, 64, wanted.data(), kPanelRows, 1);
      kernels().multiply_coded(coded.data(), one.data(), 64, 64, found.data(), kPanelRows, 1);
      for (size_t r = 0; r < kPanelRows; ++r)
        ASSERT_PRED2(same, found[r], wanted[r]) << "row " << r << " column " << c << " from " << first;
    }
  }
}

TEST_P(Format, ProductsOfEightBitWeights) {
  for (const int64_t columns : kWidths) {
    const int64_t x_stride = columns + 3, out_stride = kPanelRows + 5;
    const auto panel = gaussian(random_, kPanelRows * columns), x = gaussian(random_, 14 * x_stride);
    std::vector<std::byte> rounded(static_cast<size_t>(int8_panel_bytes(columns)));
    ASSERT_TRUE(quantise_panel(panel.data(), columns, rounded.data()));
    std::vector<std::vector<float>> rows(kPanelRows, std::vector<float>(static_cast<size_t>(columns)));
    for (int64_t r = 0; r < kPanelRows; ++r)
      dequantise_row(rounded.data(), columns, r, rows[static_cast<size_t>(r)].data());
    for (int64_t vectors = 1; vectors <= 14; vectors += columns > 100 ? 3 : 1) {
      const int offset = static_cast<int>((vectors + columns / 2) % 16);
      GuardedBytes weights(rounded, 2 * offset);
      Guarded<uint16_t> inputs(x, offset);
      Guarded<float> out(std::vector<float>(static_cast<size_t>((vectors - 1) * out_stride + kPanelRows)),
                         offset);
      kernels().multiply_int8(weights.data(), inputs.data(), x_stride, columns, out.data(), out_stride,
                              vectors);
      ASSERT_TRUE(out.intact());
      for (int64_t v = 0; v < vectors; ++v) {
        std::vector<float> alone(kPanelRows);
        kernels().multiply_int8(weights.data(), inputs.data() + v * x_stride, x_stride, columns, alone.data(),
                                kPanelRows, 1);
        for (int64_t r = 0; r < kPanelRows; ++r) {
          double sum = 0, size = 0;
          for (int64_t c = 0; c < columns; ++c) {
            const double product = static_cast<double>(rows[static_cast<size_t>(r)][static_cast<size_t>(c)]) *
                                   bf16(x[static_cast<size_t>(v * x_stride + c)]);
            sum += product;
            size += std::abs(product);
          }
          const float found = out.data()[v * out_stride + r];
          ASSERT_NEAR(found, sum, 1e-6 * size) << "row " << r << " vector " << v << " columns " << columns;
          ASSERT_EQ(std::bit_cast<uint32_t>(found), std::bit_cast<uint32_t>(alone[static_cast<size_t>(r)]));
        }
      }
    }
  }
}

TEST(Int8, RoundsToTheNearest) {
  std::mt19937 random(4);
  constexpr int64_t kOdd = 77;  // columns
  const auto panel = gaussian(random, kPanelRows * (kOdd + 1));
  std::vector<float> wide(static_cast<size_t>(kPanelRows * kOdd));
  for (int64_t c = 0; c < kOdd; ++c) {
    for (int64_t r = 0; r < kPanelRows; ++r)
      wide[static_cast<size_t>(c * kPanelRows + r)] = bf16(panel[place(c, r)]);
  }
  const auto bytes = static_cast<size_t>(int8_panel_bytes(kOdd));
  GuardedBytes from_bf16(std::vector<std::byte>(bytes, std::byte{99}), 0);
  GuardedBytes from_fp32(std::vector<std::byte>(bytes, std::byte{99}), 0);
  ASSERT_TRUE(quantise_panel(panel.data(), kOdd, from_bf16.data()));
  ASSERT_TRUE(quantise_panel(wide.data(), kOdd, from_fp32.data()));
  ASSERT_TRUE(from_bf16.intact() && from_fp32.intact());
  EXPECT_TRUE(std::equal(from_bf16.data(), from_bf16.data() + bytes, from_fp32.data()));
  std::vector<float> row(kOdd);
  for (int64_t r = 0; r < kPanelRows; ++r) {
    dequantise_row(from_bf16.data(), kOdd, r, row.data());
    for (int64_t c = 0; c < kOdd; ++c) {
      float largest = 0;
      for (int64_t i = c / 32 * 32; i < std::min(kOdd, c / 32 * 32 + 32); ++i)
        largest = std::max(largest, std::abs(bf16(panel[place(i, r)])));
      // Half a step of the scale, which is at most a 128th above a 127th of the largest.
      EXPECT_LE(std::abs(row[static_cast<size_t>(c)] - bf16(panel[place(c, r)])),
                0.5001f * largest / 127 * (1 + 1.0f / 128));
    }
  }
}

TEST(Int8, ZerosAndTinyAndHugeWeights) {
  std::vector<float> panel(kPanelRows * 32);
  for (const float size : {0.0f, 1e-45f, 1e-38f, std::numeric_limits<float>::max()}) {
    for (size_t i = 0; i < panel.size(); ++i) panel[i] = i % 3 == 0 ? size : -size;
    std::vector<std::byte> rounded(static_cast<size_t>(int8_panel_bytes(32)));
    ASSERT_TRUE(quantise_panel(panel.data(), 32, rounded.data()));
    std::vector<float> row(32);
    dequantise_row(rounded.data(), 32, 5, row.data());
    for (int64_t c = 0; c < 32; ++c)
      EXPECT_NEAR(row[static_cast<size_t>(c)], panel[static_cast<size_t>(c * kPanelRows + 5)],
                  size * 0.01f + (size == 0 ? 0 : 5e-41f));
  }
}

TEST(Int8, SaysWhereAWeightIsNotFinite) {
  for (const float wrong : {INFINITY, -INFINITY, NAN}) {
    std::vector<float> panel(kPanelRows * 5);
    std::vector<std::byte> to(static_cast<size_t>(int8_panel_bytes(5)));
    panel.back() = wrong;
    EXPECT_FALSE(quantise_panel(panel.data(), 5, to.data()));
  }
}

std::vector<float> standard_normal(std::mt19937& random, int64_t n) {
  std::normal_distribution<float> draw;
  std::vector<float> made(static_cast<size_t>(n));
  for (float& x : made) x = draw(random);
  return made;
}

std::vector<float> positive_scales(std::mt19937& random, int64_t n) {
  std::vector<float> made = standard_normal(random, n);
  for (float& scale : made) scale = std::abs(scale);
  return made;
}

std::vector<int8_t> any_integers(std::mt19937& random, int64_t n) {
  std::vector<int8_t> made(static_cast<size_t>(n));
  for (int8_t& x : made) x = static_cast<int8_t>(random());
  return made;
}

/// Keys and values of a head as integers, and rows that look at them.
struct EightBitHead {
  EightBitHead(const AttentionRows& rows, std::mt19937& random)
      : at(rows),
        room(round_up(rows.end, kKeyBlock)),
        stride(room + 7),
        key_scales(positive_scales(random, room)),
        value_scales(positive_scales(random, room)),
        keys(any_integers(random, room * rows.head_size)),
        values(any_integers(random, rows.end * rows.value_stride)),
        queries(standard_normal(random, rows.rows * rows.head_size)),
        weights(standard_normal(random, rows.rows * stride)) {}

  /// The numbers that the integers stand for.
  float key(int64_t position, int64_t d) const {
    const int64_t block = position / kKeyBlock * kKeyBlock;
    const auto i = static_cast<size_t>(block * at.head_size + d * kKeyBlock + position - block);
    return static_cast<float>(keys[i]) * key_scales[static_cast<size_t>(position)];
  }
  float value(int64_t position, int64_t d) const {
    const auto i = static_cast<size_t>(position * at.value_stride + d);
    return static_cast<float>(values[i]) * value_scales[static_cast<size_t>(position)];
  }
  /// One row of these.
  AttentionRows alone() const {
    AttentionRows one = at;
    one.rows = 1;
    return one;
  }

  AttentionRows at;
  int64_t room, stride;
  std::vector<float> key_scales, value_scales;
  std::vector<int8_t> keys, values;
  std::vector<float> queries;  // [row][dimension]
  std::vector<float> weights;  // [row][position], `stride` apart
};

/// Products added up in double, and their magnitudes, which say how near a sum in fp32 is.
struct SumInDouble {
  void add(float a, float b) {
    const double product = static_cast<double>(a) * b;
    sum += product;
    size += std::abs(product);
  }

  double sum = 0, size = 0;
};

/// Scores of all rows are those in double, and bit for bit those of each row alone.
void expect_scores(const Kernels& kernels, const EightBitHead& head, int offset) {
  const AttentionRows& at = head.at;
  Guarded<float> scores(std::vector<float>(static_cast<size_t>(at.rows * head.stride)), offset);
  kernels.score_int8(at, head.queries.data(), head.keys.data(), head.key_scales.data(), scores.data(),
                     head.stride);
  ASSERT_TRUE(scores.intact());
  std::vector<float> alone(static_cast<size_t>(head.room));
  for (int64_t r = 0; r < at.rows; ++r) {
    const float* const query = head.queries.data() + r * at.head_size;
    kernels.score_int8(head.alone(), query, head.keys.data(), head.key_scales.data(), alone.data(), 0);
    for (int64_t p = at.begin; p < at.end; ++p) {
      SumInDouble expected;
      for (int64_t d = 0; d < at.head_size; ++d) expected.add(query[d], head.key(p, d));
      const float found = scores.data()[r * head.stride + p];
      ASSERT_NEAR(found, expected.sum, 1e-6 * expected.size);
      ASSERT_EQ(found, alone[static_cast<size_t>(p)]);
    }
  }
}

/// The same of weighted sums of values.
void expect_mixes(const Kernels& kernels, const EightBitHead& head, int offset) {
  const AttentionRows& at = head.at;
  Guarded<float> out(std::vector<float>(static_cast<size_t>(at.rows * at.value_stride)), offset);
  kernels.mix_int8(at, head.weights.data(), head.stride, head.values.data(), head.value_scales.data(),
                   out.data(), at.value_stride);
  ASSERT_TRUE(out.intact());
  for (int64_t r = 0; r < at.rows; ++r) {
    const float* const weights = head.weights.data() + r * head.stride;
    std::vector<float> alone(static_cast<size_t>(at.value_stride));  // zeros: it adds
    kernels.mix_int8(head.alone(), weights, head.stride, head.values.data(), head.value_scales.data(),
                     alone.data(), at.value_stride);
    for (int64_t d = 0; d < at.value_stride; ++d) {
      SumInDouble expected;
      for (int64_t p = at.begin; p < at.end; ++p) expected.add(weights[p], head.value(p, d));
      const float found = out.data()[r * at.value_stride + d];
      ASSERT_NEAR(found, expected.sum, 1e-6 * expected.size);
      ASSERT_EQ(found, alone[static_cast<size_t>(d)]);
    }
  }
}

TEST_P(Format, AttentionOverEightBits) {
  for (const int64_t head_size : {1, 12, 16, 20, 64}) {
    for (const int64_t rows : {1, 2, 3, 8, 9, 17}) {
      for (const int64_t end : {1, 15, 16, 17, 50}) {
        const int64_t begin = end > 40 ? 32 : 0;
        const EightBitHead head({rows, begin, end, head_size, round_up(head_size, kKeyBlock)}, random_);
        const int offset = static_cast<int>((rows + end) % 16);
        ASSERT_NO_FATAL_FAILURE(expect_scores(kernels(), head, offset));
        ASSERT_NO_FATAL_FAILURE(expect_mixes(kernels(), head, offset));
      }
    }
  }
}

TEST_P(Format, QuantisingRoundsToTheNearest) {
  std::normal_distribution<float> draw(0, 3);
  for (int64_t n = 1; n <= 80; ++n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) v = draw(random_);
    GuardedBytes to(std::vector<std::byte>(x.size()), static_cast<size_t>(n % 16));
    auto* const integers = reinterpret_cast<int8_t*>(to.data());
    const float scale = kernels().quantise(x.data(), integers, n);
    ASSERT_TRUE(to.intact());
    float largest = 0;
    for (const float v : x) largest = std::max(largest, std::abs(v));
    EXPECT_EQ(scale, largest / 127);
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_NE(integers[i], -128);
      EXPECT_NEAR(static_cast<float>(integers[i]) * scale, x[static_cast<size_t>(i)], 0.50001f * scale);
    }
  }
  int8_t integers[3];
  for (const float tiny : {0.0f, -0.0f, 1e-45f, 1e-37f}) {
    const float x[] = {tiny, -tiny, 0};
    EXPECT_EQ(kernels().quantise(x, integers, 3), 0);
    EXPECT_TRUE(integers[0] == 0 && integers[1] == 0);
  }
  for (const float wrong : {NAN, -NAN, INFINITY, -INFINITY}) {
    const float x[] = {1, wrong, 2};
    const float scale = kernels().quantise(x, integers, 3);
    EXPECT_FALSE(std::isfinite(scale));
    EXPECT_TRUE(std::isnan(scale * static_cast<float>(integers[0])));
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Format,
                         testing::ValuesIn(available_kernels().begin(), available_kernels().end()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace overspill::inference
