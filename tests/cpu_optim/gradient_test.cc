// Accumulation, conversion and squares against the scalar reference.
#include "cpu_optim/gradient.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "cpu_optim/dispatch.h"
#include "tests/cpu_optim/guarded.h"
#include "tests/reference/reference.h"

namespace overspill::optim {
namespace {

// Any bit pattern that is finite, or any at all.
std::vector<float> random_floats(size_t n, uint32_t seed, bool finite) {
  std::mt19937 random(seed);
  std::vector<float> x(n);
  for (float& value : x) {
    do {
      value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    } while (finite && !std::isfinite(value));
  }
  return x;
}

std::vector<uint16_t> to_bf16(const std::vector<float>& x) {
  std::vector<uint16_t> narrow(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    narrow[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(x[i]) >> 16);
  return narrow;
}

std::vector<size_t> counts() {
  std::vector<size_t> all{4095, 4096, 4097, 8192, 12345, 100'003};
  for (size_t n = 0; n <= 2 * 32 + 1; ++n) all.push_back(n);
  return all;
}

TEST(Squares, TheTreeIsTheDocumentedOneOnEveryForm) {
  int64_t cases = 0;
  for (const size_t n : counts()) {
    const std::vector<float> x = random_floats(n, static_cast<uint32_t>(n), true);
    const std::vector<uint16_t> x16 = to_bf16(x);
    int finite = 0;
    const double tree = reference_tree_squares(x.data(), 0, static_cast<int64_t>(n), &finite);
    const double tree16 = reference_tree_squares(x16.data(), 1, static_cast<int64_t>(n), &finite);
    EXPECT_NEAR(tree, reference_squares(x.data(), 0, static_cast<int64_t>(n), &finite), tree * 1e-13);
    EXPECT_NEAR(tree16, reference_squares(x16.data(), 1, static_cast<int64_t>(n), &finite), tree16 * 1e-13);
    for (int offset = 0; offset < (n < 100 ? 16 : 2); ++offset) {
      for (const Kernels* form : available_kernels()) {
        Guarded<float> at(x, offset);
        Guarded<uint16_t> at16(x16, offset);
        const Squares sum = form->squares_fp32(at.data(), static_cast<int64_t>(n));
        const Squares sum16 = form->squares_bf16(at16.data(), static_cast<int64_t>(n));
        ASSERT_EQ(sum.sum, tree) << form->name << " n " << n;
        ASSERT_EQ(sum16.sum, tree16) << form->name << " n " << n;
        ASSERT_TRUE(sum.finite && sum16.finite);
        cases += 2;
      }
    }
  }
  std::printf("%lld cases\n", static_cast<long long>(cases));
}

TEST(Squares, OneElementThatIsNotFiniteIsSeenWhereverItIs) {
  const std::vector<float> x = random_floats(70, 3, true);
  const float bad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                       std::numeric_limits<float>::quiet_NaN(), std::bit_cast<float>(0xFF800001u)};
  for (const Kernels* form : available_kernels()) {
    for (size_t n = 1; n <= x.size(); ++n) {
      for (size_t at = 0; at < n; ++at) {
        std::vector<float> with(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(n));
        with[at] = bad[at % 4];
        std::vector<uint16_t> with16 = to_bf16(with);
        if (at % 4 == 3) with16[at] = 0xFF81;  // the NaN's only set bit was cut off
        int finite = 1;
        const auto count = static_cast<int64_t>(n);
        const Squares sum = form->squares_fp32(with.data(), count),
                      sum16 = form->squares_bf16(with16.data(), count);
        ASSERT_EQ(sum.sum, reference_tree_squares(with.data(), 0, count, &finite));
        ASSERT_EQ(sum16.sum, reference_tree_squares(with16.data(), 1, count, &finite));
        ASSERT_FALSE(sum.finite) << form->name << " n " << n << " at " << at;
        ASSERT_FALSE(sum16.finite) << form->name << " n " << n << " at " << at;
      }
    }
  }
}

TEST(Squares, LargeSumsDoNotOverflowAndEmptyIsZero) {
  const std::vector<float> x(10'000, std::numeric_limits<float>::max());
  const double one = static_cast<double>(x[0]) * x[0];
  EXPECT_NEAR(squares(std::span<const float>(x)).sum, one * 10'000, one * 1e-6);
  EXPECT_EQ(squares(std::span<const float>()).sum, 0);
  EXPECT_TRUE(squares(std::span<const uint16_t>()).finite);
}

TEST(Convert, EveryBf16Widens) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const Kernels* form : available_kernels()) {
    std::vector<float> wide(all.size());
    form->widen_bf16(all.data(), wide.data(), 65536);
    for (size_t i = 0; i < all.size(); ++i) {
      ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(reference_widen(all[i])))
          << form->name;
    }
  }
}

// Every upper half with the lower halves that decide the rounding.
TEST(Convert, NarrowsToNearestEven) {
  std::vector<float> x;
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    for (const uint32_t lower : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      x.push_back(std::bit_cast<float>(upper << 16 | lower));
    }
  }
  for (const Kernels* form : available_kernels()) {
    std::vector<uint16_t> narrow(x.size());
    form->narrow_bf16(x.data(), narrow.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(narrow[i], reference_narrow(x[i])) << form->name << " " << std::bit_cast<uint32_t>(x[i]);
    }
  }
}

/// Small ones and large ones, which pass the caches: nothing before or behind is touched.
TEST(CopyForLater, EveryCountAndMisalignment) {
  std::mt19937 random(7);
  for (const size_t count : {size_t{0}, size_t{1}, size_t{63}, size_t{4096}, size_t{256 << 10},
                             size_t{(256 << 10) + 1}, size_t{(256 << 10) + 127}, size_t{1'000'003}}) {
    for (const size_t offset : {size_t{0}, size_t{1}, size_t{2}, size_t{31}, size_t{63}}) {
      std::vector<std::byte> from(count + 64), to(count + 192, std::byte{0xEE});
      for (std::byte& byte : from) byte = static_cast<std::byte>(random());
      std::vector<std::byte> expected = to;
      std::copy_n(from.begin() + 3, count, expected.begin() + static_cast<std::ptrdiff_t>(offset));
      copy_for_later(std::span(from).subspan(3, count), std::span(to).subspan(offset, count));
      EXPECT_EQ(to, expected) << count << " bytes at " << offset;
    }
  }
  std::vector<std::byte> three(3), four(4);
  EXPECT_THROW(copy_for_later(three, four), std::invalid_argument);
}

TEST(Accumulate, EveryCountMisalignmentAndForm) {
  int64_t cases = 0;
  for (size_t n = 0; n <= 33; ++n) {
    const std::vector<float> a = random_floats(n, 1, false), b = random_floats(n, 2, false);
    const std::vector<uint16_t> a16 = to_bf16(a), b16 = to_bf16(b);
    for (int offset = 0; offset < 16; ++offset) {
      for (const Kernels* form : available_kernels()) {
        const auto count = static_cast<int64_t>(n);
        Guarded<float> from(a, offset), to(b, 15 - offset), to_wide(b, offset), scaled(b, offset),
            wide(b, offset);
        Guarded<uint16_t> from16(a16, offset), to16(b16, 15 - offset), narrow(b16, offset);
        form->accumulate_fp32_fp32(from.data(), to.data(), count);
        form->accumulate_bf16_fp32(from16.data(), to_wide.data(), count);
        form->accumulate_bf16_bf16(from16.data(), to16.data(), count);
        form->scale(scaled.data(), 0.3f, count);
        form->widen_bf16(from16.data(), wide.data(), count);
        form->narrow_bf16(from.data(), narrow.data(), count);
        for (size_t i = 0; i < n; ++i) {
          ASSERT_TRUE(same(to.data()[i], b[i] + a[i])) << form->name << " n " << n;
          ASSERT_TRUE(same(to_wide.data()[i], b[i] + reference_widen(a16[i]))) << form->name << " n " << n;
          ASSERT_EQ(to16.data()[i], reference_narrow(reference_widen(b16[i]) + reference_widen(a16[i])));
          ASSERT_TRUE(same(scaled.data()[i], b[i] * 0.3f)) << form->name << " n " << n;
          ASSERT_TRUE(same(wide.data()[i], reference_widen(a16[i]))) << form->name << " n " << n;
          ASSERT_EQ(narrow.data()[i], reference_narrow(a[i])) << form->name << " n " << n;
        }
        ASSERT_TRUE(from.intact() && to.intact() && to_wide.intact() && scaled.intact() && wide.intact());
        ASSERT_TRUE(from16.intact() && to16.intact() && narrow.intact()) << form->name << " n " << n;
        cases += 6;
      }
    }
  }
  std::printf("%lld cases\n", static_cast<long long>(cases));
}

TEST(Accumulate, TheFrontEndsAgreeAndCheckSizes) {
  const std::vector<float> a{1, 2, 3};
  const std::vector<uint16_t> a16{0x3F80, 0x4000, 0x4040};
  std::vector<float> to{10, 20, 30}, two(2, 5.0f);
  std::vector<uint16_t> to16 = a16, two16(2, 7);
  accumulate(a, to);
  accumulate(a16, to);
  scale(to, 0.5f);
  EXPECT_EQ(to, (std::vector<float>{6, 12, 18}));
  accumulate(a16, to16);
  EXPECT_EQ(to16, (std::vector<uint16_t>{0x4000, 0x4080, 0x40C0}));
  narrow(a, to16);
  EXPECT_EQ(to16, a16);
  widen(a16, to);
  EXPECT_EQ(to, a);
  EXPECT_THROW(accumulate(a, two), std::invalid_argument);
  EXPECT_THROW(accumulate(a16, two), std::invalid_argument);
  EXPECT_THROW(accumulate(a16, two16), std::invalid_argument);
  EXPECT_THROW(widen(a16, two), std::invalid_argument);
  EXPECT_THROW(narrow(a, two16), std::invalid_argument);
  EXPECT_EQ(two, std::vector<float>(2, 5.0f));
  EXPECT_EQ(two16, std::vector<uint16_t>(2, 7));
}

}  // namespace
}  // namespace overspill::optim
