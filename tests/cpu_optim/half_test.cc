// fp16: conversions, accumulation and squares against the scalar reference.
#include "cpu_optim/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <vector>

#include "cpu_optim/dispatch.h"
#include "cpu_optim/gradient.h"
#include "tests/cpu_optim/guarded.h"
#include "tests/reference/update.h"

namespace overspill::optim {
namespace {

std::vector<Fp16> every_half() {
  std::vector<Fp16> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i].bits = static_cast<uint16_t>(i);
  return all;
}

bool same_half(uint16_t a, uint16_t b) {
  const bool nan_a = (a & 0x7FFF) > 0x7C00, nan_b = (b & 0x7FFF) > 0x7C00;
  return nan_a || nan_b ? nan_a && nan_b : a == b;
}

TEST(Half, EveryOneWidens) {
  const std::vector<Fp16> all = every_half();
  for (const Kernels* form : available_kernels()) {
    std::vector<float> wide(all.size());
    form->widen_fp16(all.data(), wide.data(), 65536);
    for (size_t i = 0; i < all.size(); ++i)
      ASSERT_TRUE(same(wide[i], reference_widen_half(all[i].bits))) << form->name << " " << i;
  }
}

// Every half, what lies a little beside it, and the middle to the next with what lies a little beside that.
TEST(Half, NarrowsToNearestEven) {
  std::vector<float> x{65519.0f, 65520.0f, 65536.0f, 1e30f, -1e30f, 0x1p-149f, -0x1p-126f};
  for (const Fp16 half : every_half()) {
    const float at = reference_widen_half(half.bits);
    const float middle = at + (reference_widen_half(static_cast<uint16_t>(half.bits + 1)) - at) / 2;
    for (const float value : {at, middle}) {
      x.push_back(value);
      x.push_back(std::nextafter(value, INFINITY));
      x.push_back(std::nextafter(value, -INFINITY));
    }
  }
  for (const Kernels* form : available_kernels()) {
    std::vector<Fp16> narrow(x.size());
    form->narrow_fp16(x.data(), narrow.data(), std::ssize(x));
    for (size_t i = 0; i < x.size(); ++i)
      ASSERT_TRUE(same_half(narrow[i].bits, reference_narrow_half(x[i]))) << form->name << " " << x[i];
  }
}

TEST(Half, AccumulatesAndSumsAtEveryCountAndMisalignment) {
  int64_t cases = 0;
  for (size_t n = 0; n <= 67; ++n) {
    std::vector<Fp16> a(n), b(n);
    std::vector<float> wide(n), wide_a(n);
    for (size_t i = 0; i < n; ++i) {
      a[i].bits = static_cast<uint16_t>(i * 7919 + n), b[i].bits = static_cast<uint16_t>(i * 104'729 + 3 * n);
      wide[i] = reference_widen_half(b[i].bits), wide_a[i] = reference_widen_half(a[i].bits);
    }
    int finite = 0;
    const double sum = reference_tree_squares(wide_a.data(), 0, static_cast<int64_t>(n), &finite);
    for (int offset = 0; offset < 16; ++offset) {
      for (const Kernels* form : available_kernels()) {
        const auto count = static_cast<int64_t>(n);
        Guarded<Fp16> from(a, offset), to(b, 15 - offset);
        Guarded<float> to_wide(wide, offset);
        form->accumulate_fp16_fp16(from.data(), to.data(), count);
        form->accumulate_fp16_fp32(from.data(), to_wide.data(), count);
        const Squares squares = form->squares_fp16(from.data(), count);
        ASSERT_EQ(squares.sum, sum) << form->name << " n " << n;
        ASSERT_EQ(squares.finite, finite != 0) << form->name << " n " << n;
        for (size_t i = 0; i < n; ++i) {
          ASSERT_TRUE(same(to_wide.data()[i], wide[i] + wide_a[i])) << form->name << " n " << n;
          ASSERT_TRUE(same_half(to.data()[i].bits, reference_narrow_half(wide[i] + wide_a[i]))) << form->name;
        }
        ASSERT_TRUE(from.intact() && to.intact() && to_wide.intact()) << form->name << " n " << n;
        cases += 3;
      }
    }
  }
  std::printf("%lld cases\n", static_cast<long long>(cases));
}

TEST(Half, TheFrontEndsAgreeAndCheckSizes) {
  const std::vector<Fp16> a{{0x3C00}, {0x4000}};  // 1, 2
  std::vector<float> to{10, 20}, three(3);
  std::vector<Fp16> to16 = a, three16(3);
  accumulate(a, to);
  EXPECT_EQ(to, (std::vector<float>{11, 22}));
  accumulate(a, to16);
  EXPECT_EQ(to16, (std::vector<Fp16>{{0x4000}, {0x4400}}));
  widen(a, to);
  EXPECT_EQ(to, (std::vector<float>{1, 2}));
  narrow(to, to16);
  EXPECT_EQ(to16, a);
  EXPECT_EQ(squares(std::span<const Fp16>(a)).sum, 5);
  EXPECT_FALSE(squares(std::span<const Fp16>(std::vector<Fp16>{{0x7C00}})).finite);
  EXPECT_THROW(accumulate(a, three), std::invalid_argument);
  EXPECT_THROW(accumulate(a, three16), std::invalid_argument);
  EXPECT_THROW(widen(a, three), std::invalid_argument);
  EXPECT_THROW(narrow(to, three16), std::invalid_argument);
}

}  // namespace
}  // namespace overspill::optim
