// AVX2, FMA and F16C: eight lanes.
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

inline U32 choose(U32 mask, U32 yes, U32 no) {
  return reinterpret_cast<U32>(_mm256_blendv_epi8(
      reinterpret_cast<__m256i>(no), reinterpret_cast<__m256i>(yes), reinterpret_cast<__m256i>(mask)));
}
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

inline U32 extend(U16 x) {
  return reinterpret_cast<U32>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x)));
}
inline U32 extend(I16 x) {
  return reinterpret_cast<U32>(_mm256_cvtepi16_epi32(reinterpret_cast<__m128i>(x)));
}
inline U16 lower_halves(U32 x) {
  const __m256i pick =
      _mm256_set1_epi64x(0x0D0C090805040100);  // in both 16-byte parts, into their first 8 bytes
  const __m256i parts = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(x), pick);
  return reinterpret_cast<U16>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(parts, 0b1000)));
}

inline F32 widen_half(U16 x) {
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(x));
}
inline U16 narrow_half(F32 x) {
  return reinterpret_cast<U16>(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

#include "cpu_optim/kernels.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::optim::avx2
