// AVX2 and FMA: eight lanes.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpu_optim/dispatch.h"

namespace overspill::optim::avx2 {
namespace {

constexpr const char* kName = "avx2";
constexpr int kLanes = 8;
#include "cpu_optim/vector.inl"
#include "cpu_optim/vector_partial.inl"

inline F32 fma(F32 a, F32 b, F32 c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline F32 sqrt(F32 x) {
  return _mm256_sqrt_ps(x);
}
inline F64 low(F32 x) {
  return _mm256_cvtps_pd(_mm256_castps256_ps128(x));
}
inline F64 high(F32 x) {
  return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
}

#include "cpu_optim/kernels.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::optim::avx2
