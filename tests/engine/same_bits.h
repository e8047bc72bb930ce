// Whether two arrays of fp32 are the same, to the last bit.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace overspill::testing {

/// Fails, naming the first element that differs. NaN equals the same NaN, -0.0 does not equal 0.0.
inline void expect_same_bits(const std::vector<float>& found, const std::vector<float>& expected,
                             const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  // All at once: sanitizers look at every call.
  if (std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0) return;
  size_t i = 0;
  while (std::bit_cast<uint32_t>(found[i]) == std::bit_cast<uint32_t>(expected[i])) ++i;
  FAIL() << what << ": element " << i << " is " << found[i] << ", not " << expected[i];
}

}  // namespace overspill::testing
