// Numbers on which kernels and the CPU have to agree.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace overspill::kernels {

/// Of every magnitude; one in 16 is special. `finite`: no inf and no NaN.
inline std::vector<float> values(int64_t count, uint32_t seed, bool finite = true) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float special[] = {0.0F, -0.0F, 1e-45F, -1e-40F, 1.00390625F, 3.4e38F, kInf, -kInf, std::nanf("")};
  std::mt19937 random(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) {
    x = std::ldexp(static_cast<float>(random() >> 8) - 8'388'608.0F, static_cast<int>(random() % 60) - 60);
    if (random() % 16 == 0) x = special[random() % (finite ? 6 : 9)];
  }
  return out;
}

/// A NaN's payload aside.
inline bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

/// Around the sizes at which kernels cut their work.
constexpr int64_t kCounts[] = {1, 31, 32, 33, 4095, 4096, 4097, 100'003};
/// Of updates, of which there are many kinds.
constexpr int64_t kUpdatedCounts[] = {0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 5'003};

}  // namespace overspill::kernels
