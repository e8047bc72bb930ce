// Every form against scalar loops in double, over counts and misalignments, with sentinels around what is
// written; and the promise that what is computed together is what would be computed alone.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "inference/kernels/forms.h"
#include "tests/cpu_optim/guarded.h"
#include "tests/inference/bf16.h"

namespace overspill::inference {
namespace {

using optim::Guarded;

class Form : public testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels() { return *GetParam(); }
  std::vector<float> numbers(int64_t n, float size = 1) {
    std::normal_distribution<float> draw(0, size);
    std::vector<float> made(static_cast<size_t>(n));
    for (float& x : made) x = draw(random_);
    return made;
  }
  std::vector<uint16_t> halves(int64_t n) {
    std::vector<uint16_t> made;
    for (const float x : numbers(n)) made.push_back(to_bf16(x));
    return made;
  }
  std::mt19937 random_{1};
};

const int64_t kColumns[] = {2, 4, 6, 8, 14, 16, 18, 30, 34, 66, 130, 576};

template <class T, class Widen, class Multiply>
void check_product(const std::vector<T>& panel, const std::vector<T>& x, int64_t columns, int64_t pair,
                   int64_t vectors, int offset, Widen widen, Multiply multiply) {
  const int64_t x_stride = columns + 3, out_stride = kPanelRows + 5;
  Guarded<T> weights(panel, offset), inputs(x, offset);
  Guarded<float> out(std::vector<float>(static_cast<size_t>((vectors - 1) * out_stride + kPanelRows)),
                     offset);
  multiply(weights.data(), inputs.data(), x_stride, columns, out.data(), out_stride, vectors);
  ASSERT_TRUE(out.intact());
  for (int64_t v = 0; v < vectors; ++v) {
    Guarded<float> alone(std::vector<float>(kPanelRows), 0);
    multiply(weights.data(), inputs.data() + v * x_stride, x_stride, columns, alone.data(), out_stride,
             int64_t{1});
    for (int64_t r = 0; r < kPanelRows; ++r) {
      double sum = 0, size = 0;
      for (int64_t c = 0; c < columns; ++c) {
        const double product =
            static_cast<double>(
                widen(panel[static_cast<size_t>(c / pair * pair * kPanelRows + r * pair + c % pair)])) *
            widen(x[static_cast<size_t>(v * x_stride + c)]);
        sum += product;
        size += std::abs(product);
      }
      const float found = out.data()[v * out_stride + r];
      ASSERT_NEAR(found, sum, 1e-6 * (size + 1)) << "row " << r << " vector " << v << " columns " << columns;
      ASSERT_EQ(std::bit_cast<uint32_t>(found), std::bit_cast<uint32_t>(alone.data()[r]))
          << "row " << r << " of vector " << v << " depends on the other " << vectors - 1;
    }
  }
}

TEST_P(Form, Products) {
  for (const int64_t columns : kColumns) {
    const auto panel = halves(columns * kPanelRows);
    const auto x = halves(14 * (columns + 3));
    const auto wide_panel = numbers((columns - 1) * kPanelRows);
    const auto wide_x = numbers(14 * (columns + 2));
    for (int64_t vectors = 1; vectors <= 14; vectors += columns > 100 ? 5 : 1) {
      const int offset = static_cast<int>((vectors + columns / 2) % 16);
      check_product(panel, x, columns, 2, vectors, offset, bf16, kernels().multiply_bf16);
      check_product(
          wide_panel, wide_x, columns - 1, 1, vectors, offset, [](float w) { return w; },
          kernels().multiply_fp32);
    }
  }
}

TEST_P(Form, Attention) {
  for (const int64_t head_size : {1, 12, 16, 20, 64}) {
    for (const int64_t rows : {1, 2, 3, 8, 9, 17}) {
      for (const int64_t end : {1, 15, 16, 17, 50}) {
        const int64_t begin = end > 40 ? 32 : 0, room = round_up(end, kKeyBlock);
        const int64_t stride = room + 7, value_stride = round_up(head_size, kKeyBlock);
        const AttentionRows at{rows, begin, end, head_size, value_stride};
        const auto q = numbers(rows * head_size);
        const auto keys = halves(room * head_size), values = halves(end * value_stride);
        Guarded<float> scores(std::vector<float>(static_cast<size_t>(rows * stride)),
                              static_cast<int>(rows % 16));
        kernels().score_bf16(at, q.data(), keys.data(), scores.data(), stride);
        ASSERT_TRUE(scores.intact());
        std::vector<float> wide_keys, wide_values;
        for (const uint16_t key : keys) wide_keys.push_back(bf16(key));
        for (const uint16_t value : values) wide_values.push_back(bf16(value));
        Guarded<float> wide(std::vector<float>(static_cast<size_t>(rows * stride)), 1);
        kernels().score_fp32(at, q.data(), wide_keys.data(), wide.data(), stride);
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t p = begin; p < end; ++p) {
            double sum = 0;
            for (int64_t d = 0; d < head_size; ++d)
              sum += static_cast<double>(q[static_cast<size_t>(r * head_size + d)]) *
                     wide_keys[static_cast<size_t>(p / kKeyBlock * kKeyBlock * head_size + d * kKeyBlock +
                                                   p % kKeyBlock)];
            ASSERT_NEAR(scores.data()[r * stride + p], sum, 1e-5 * (1 + static_cast<double>(head_size)));
            ASSERT_EQ(scores.data()[r * stride + p], wide.data()[r * stride + p]);
          }
        }
        const auto weights = numbers(rows * stride);
        Guarded<float> out(std::vector<float>(static_cast<size_t>(rows * value_stride)),
                           static_cast<int>(end % 16));
        Guarded<float> wide_out(std::vector<float>(static_cast<size_t>(rows * value_stride)), 0);
        kernels().mix_bf16(at, weights.data(), stride, values.data(), out.data(), value_stride);
        kernels().mix_fp32(at, weights.data(), stride, wide_values.data(), wide_out.data(), value_stride);
        ASSERT_TRUE(out.intact() && wide_out.intact());
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t d = 0; d < value_stride; ++d) {
            double sum = 0;
            for (int64_t p = begin; p < end; ++p)
              sum += static_cast<double>(weights[static_cast<size_t>(r * stride + p)]) *
                     wide_values[static_cast<size_t>(p * value_stride + d)];
            ASSERT_NEAR(out.data()[r * value_stride + d], sum, 1e-4);
            ASSERT_EQ(out.data()[r * value_stride + d], wide_out.data()[r * value_stride + d]);
          }
        }
      }
    }
  }
}

TEST_P(Form, Softmax) {
  for (const float softcap : {0.0f, 3.0f}) {
    for (int64_t first = 16; first < 34; ++first) {
      for (const int64_t length : {1, 2, 15, 16, 17, 40}) {
        const int64_t last = first + length, end = round_up(last + length % 3 * 16, kKeyBlock);
        const int64_t begin = first / kKeyBlock * kKeyBlock;
        const auto before = numbers(end, 20);
        Guarded<float> x(before, static_cast<int>(first % 16));
        kernels().softmax(x.data(), begin, first, last, end, 0.3f, softcap);
        ASSERT_TRUE(x.intact());
        const auto score = [&](int64_t i) {
          const double scaled = 0.3 * before[static_cast<size_t>(i)];
          return softcap > 0 ? softcap * std::tanh(scaled / softcap) : scaled;
        };
        double largest = score(first), total = 0;
        for (int64_t i = first; i < last; ++i) largest = std::max(largest, score(i));
        for (int64_t i = first; i < last; ++i) total += std::exp(score(i) - largest);
        for (int64_t i = 0; i < end; ++i) {
          const bool inside = i >= first && i < last;
          const double wanted = inside      ? std::exp(score(i) - largest) / total
                                : i < begin ? before[static_cast<size_t>(i)]
                                            : 0;
          ASSERT_NEAR(x.data()[i], wanted, i < begin ? 0 : 2e-6) << i << " of " << first << " to " << last;
        }
      }
    }
  }
}

TEST_P(Form, FunctionsOfSingleValues) {
  for (int64_t n = 1; n <= 50; ++n) {
    const int offset = static_cast<int>(n % 16);
    const auto x = numbers(n, 3), up = numbers(n), bias = numbers(n);
    double squares = 0, sum = 0, exponentials = 0;
    for (const float v : x) {
      squares += static_cast<double>(v) * v;
      sum += v;
      exponentials += std::exp(static_cast<double>(v));
    }
    EXPECT_NEAR(kernels().sum_of_squares(x.data(), n), squares, 1e-6 * squares);
    EXPECT_NEAR(kernels().sum(x.data(), n), sum, 1e-4);
    EXPECT_NEAR(kernels().log_sum_exp(x.data(), n), std::log(exponentials), 1e-5);
    Guarded<float> silu(x, offset), gelu(x, offset), gated(x, offset), added(x, offset), normed(x, offset);
    kernels().silu(silu.data(), nullptr, n);
    kernels().gelu_tanh(gelu.data(), nullptr, n);
    kernels().silu(gated.data(), up.data(), n);
    kernels().add(up.data(), added.data(), n);
    kernels().normalise(normed.data(), 0.5f, 2.0f, up.data(), 1.0f, bias.data(), normed.data(), n);
    EXPECT_TRUE(silu.intact() && gelu.intact() && gated.intact() && added.intact() && normed.intact());
    for (int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<size_t>(i);
      const double v = x[at], u = std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v);
      EXPECT_NEAR(silu.data()[i], v / (1 + std::exp(-v)), 1e-6 * (1 + std::abs(v)));
      EXPECT_NEAR(gelu.data()[i], 0.5 * v * (1 + std::tanh(u)), 1e-6 * (1 + std::abs(v)));
      EXPECT_NEAR(gated.data()[i], v / (1 + std::exp(-v)) * up[at], 1e-5);
      EXPECT_EQ(added.data()[i], x[at] + up[at]);
      EXPECT_NEAR(normed.data()[i], (v - 0.5) * 2 * (up[at] + 1.0) + bias[at], 1e-5 * (1 + std::abs(v)));
    }
  }
}

TEST_P(Form, Extremes) {
  const float largest = 3e38f, infinity = INFINITY;
  std::vector<float> x{largest, -largest, 100, -100, 1e-40f, 0, -0.0f, infinity, NAN};
  kernels().silu(x.data(), nullptr, static_cast<int64_t>(x.size()));
  EXPECT_EQ(x[0], largest);
  EXPECT_NEAR(x[1], 0, 2);  // exp(88) is the largest there is: -3e38 / 1.7e38
  EXPECT_EQ(x[2], 100);
  EXPECT_NEAR(x[3], 0, 1e-30);
  EXPECT_EQ(x[5], 0);
  EXPECT_EQ(x[7], infinity);
  EXPECT_TRUE(std::isnan(x[8]));
  const std::vector<float> huge{1000, 1000, -1000};
  EXPECT_NEAR(kernels().log_sum_exp(huge.data(), 3), 1000 + std::log(2), 1e-3);
}

TEST_P(Form, NarrowingRoundsToNearestEven) {
  std::vector<float> all;
  for (uint32_t hi = 0; hi < 0x10000; hi += 7) {
    for (const uint32_t lo : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
      all.push_back(std::bit_cast<float>(hi << 16 | lo));
  }
  std::vector<uint16_t> narrow(all.size());
  std::vector<float> wide(all.size());
  kernels().narrow(all.data(), narrow.data(), static_cast<int64_t>(all.size()));
  kernels().widen(narrow.data(), wide.data(), static_cast<int64_t>(all.size()));
  for (size_t i = 0; i < all.size(); ++i) {
    if (std::isnan(all[i])) {
      ASSERT_EQ(narrow[i], 0x7FC0);
      continue;
    }
    const auto bits = std::bit_cast<uint32_t>(all[i]);
    const uint32_t down = bits >> 16, rest = bits & 0xFFFF;
    const bool up = rest > 0x8000 || (rest == 0x8000 && (down & 1) != 0);
    ASSERT_EQ(narrow[i], static_cast<uint16_t>(down + (up ? 1 : 0)));
    ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), static_cast<uint32_t>(narrow[i]) << 16);
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Form,
                         testing::ValuesIn(available_kernels().begin(), available_kernels().end()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace overspill::inference
