// The split master over every bit pattern there is.
#include "cpu_optim/split.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <numeric>
#include <vector>

#include "cpu_optim/dispatch.h"
#include "cpu_optim/executor.h"
#include "tests/reference/reference.h"
#include "tests/watched.h"

namespace overspill::optim {
namespace {

constexpr int64_t kSlice = 8192;
constexpr int64_t kSlices = (int64_t{1} << 32) / kSlice;
// Instrumented code is slow: there, every 127th slice (odd, so that all alignments of the upper half occur).
constexpr int64_t kStride = kWatched ? 127 : 1;

// Calls check(bits, hi, lo) for the slices, split by the reference, on two threads; prints how many patterns
// that were.
template <class Check>
void for_all_patterns(const char* name, int64_t stride, Check check) {
  std::atomic<int64_t> patterns{0};
  make_executor(2)->parallel_for((kSlices + stride - 1) / stride, [&](int64_t slice) {
    std::vector<uint32_t> bits(kSlice);
    std::vector<uint16_t> hi(kSlice);
    std::vector<int16_t> lo(kSlice);
    std::iota(bits.begin(), bits.end(), static_cast<uint32_t>(slice * stride * kSlice));
    reference_split(bits.data(), hi.data(), lo.data(), kSlice);
    check(bits, hi, lo);
    patterns += kSlice;
  });
  std::printf("%s: %lld patterns\n", name, static_cast<long long>(patterns));
}

TEST(Split, EveryPatternIsExactAndAsTheReference) {
  std::atomic<int64_t> wrong{0};
  for_all_patterns("split.h", kStride, [&](auto& bits, auto& hi, auto& lo) {
    int64_t differ = 0;
    std::vector<uint32_t> joined(kSlice);
    reference_join(hi.data(), lo.data(), joined.data(), kSlice);
    for (size_t i = 0; i < kSlice; ++i) {
      differ += split_hi(bits[i]) != hi[i];
      differ += split_lo(bits[i]) != lo[i];
      differ += join_split(hi[i], lo[i]) != bits[i];
      differ += joined[i] != bits[i];
    }
    wrong += differ;
  });
  EXPECT_EQ(wrong, 0);
}

// A step that changes nothing (lr 0, no decay, zero gradient) joins and splits each weight inside the kernel.
// NaN is left out, because arithmetic makes it quiet. The widest form takes all, the others every 31st slice.
TEST(Split, EveryPatternSurvivesAStepThatChangesNothing) {
  const Adam::Factors factors = Adam::factors({.lr = 0}, 1);
  for (const Kernels* form : available_kernels()) {
    const int64_t stride = form == available_kernels().back() ? kStride : 31 * kStride;
    std::atomic<int64_t> wrong{0};
    for_all_patterns(form->name, stride, [&](auto& bits, auto& hi, auto& lo) {
      std::vector<uint16_t> hi_after = hi;
      std::vector<int16_t> lo_after = lo;
      std::vector<float> m(kSlice), v(kSlice);
      const std::vector<uint16_t> grad(kSlice);
      const auto bytes = [](auto& array) { return reinterpret_cast<std::byte*>(array.data()); };
      std::byte* const components[] = {bytes(hi_after), bytes(lo_after), bytes(m), bytes(v)};
      form->update_of(optimizer_of(AdamConfig{}), Format::exact, Element::bf16)({.components = components,
                                                                                 .gradient = grad.data(),
                                                                                 .elements = kSlice,
                                                                                 .begin = 0,
                                                                                 .end = kSlice,
                                                                                 .factors = &factors,
                                                                                 .grad_scale = 1,
                                                                                 .noise = {}});
      int64_t differ = 0;
      for (size_t i = 0; i < kSlice; ++i) {
        const bool is_number = (bits[i] & 0x7FFFFFFFu) <= 0x7F800000u;
        differ +=
            static_cast<int>(is_number) & static_cast<int>(hi_after[i] != hi[i] || lo_after[i] != lo[i]);
      }
      wrong += differ;
    });
    EXPECT_EQ(wrong, 0) << form->name;
  }
}

TEST(Split, WorkedExample) {
  EXPECT_EQ(split_hi(0x3F808000u), 0x3F81);
  EXPECT_EQ(split_lo(0x3F808000u), -32768);
  EXPECT_EQ(join_split(0x3F81, -32768), 0x3F808000u);
}

}  // namespace
}  // namespace overspill::optim
