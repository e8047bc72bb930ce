// Which form is chosen, and that a caller's floating-point mode does not reach the kernels.
#include "cpu_optim/dispatch.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_optim/floating_point.h"

namespace overspill::optim {
namespace {

TEST(Dispatch, ALimitIsKept) {
  EXPECT_STREQ(available_kernels().front()->name, "portable");
  EXPECT_STREQ(choose_kernels("portable").name, "portable");
  EXPECT_EQ(&choose_kernels(""), available_kernels().back());
  EXPECT_EQ(&choose_kernels("avx512"), available_kernels().back());
  EXPECT_STRNE(choose_kernels("avx2").name, "avx512");
  for (const Kernels* form : available_kernels()) {
    EXPECT_EQ(&choose_kernels(form->name), form);
    std::printf("available: %s\n", form->name);
  }
}

TEST(Dispatch, AnUnknownNameIsAnErrorThatNamesIt) {
  try {
    choose_kernels("sse9");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("sse9"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("portable"), std::string::npos);
  }
}

// In a process of its own, because the choice is made once.
TEST(DispatchDeathTest, TheEnvironmentLimitsTheChoice) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto choose = [](const char* limit) {
    setenv("OVERSPILL_ISA", limit, 1);
    try {
      const bool as_asked = instruction_set() == limit;
      setenv("OVERSPILL_ISA", "changed later", 1);
      std::exit(as_asked && instruction_set() == limit ? 0 : 1);
    } catch (const std::invalid_argument& error) {
      std::fprintf(stderr, "%s\n", error.what());
      std::exit(2);
    }
  };
  EXPECT_EXIT(choose("portable"), testing::ExitedWithCode(0), "");
  EXPECT_EXIT(choose("mmx"), testing::ExitedWithCode(2), "OVERSPILL_ISA is 'mmx'");
}

#if defined(__x86_64__)
TEST(FloatingPoint, AFlushingCallerGetsDenormalsAndKeepsItsMode) {
  const float denormal = 0x1p-140f;
  std::vector<float> to{denormal};
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0xFFC0);  // flush, denormals are zero, round towards zero
  accumulate(std::vector<float>{denormal}, to);
  const unsigned kept = _mm_getcsr() & 0xFFC0;
  _mm_setcsr(before);
  EXPECT_EQ(kept, 0xFFC0u);
  EXPECT_EQ(to[0], 0x1p-139f);
}
#endif

}  // namespace
}  // namespace overspill::optim
