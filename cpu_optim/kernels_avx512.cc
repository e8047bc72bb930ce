// AVX-512 F, BW, DQ, VL: sixteen lanes, and masks.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpu_optim/dispatch.h"

namespace overspill::optim::avx512 {
namespace {

constexpr const char* kName = "avx512";
constexpr int kLanes = 16;
#include "cpu_optim/vector.inl"

inline U32 choose(U32 mask, U32 yes, U32 no) {
  return reinterpret_cast<U32>(_mm512_ternarylogic_epi32(
      reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(yes), reinterpret_cast<__m512i>(no), 0xCA));
}
inline F32 fma(F32 a, F32 b, F32 c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline F32 sqrt(F32 x) {
  return _mm512_sqrt_ps(x);
}
inline F64 low(F32 x) {
  return _mm512_cvtps_pd(_mm512_castps512_ps256(x));
}
inline F64 high(F32 x) {
  return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
}

inline U32 extend(U16 x) {
  return reinterpret_cast<U32>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x)));
}
inline U32 extend(I16 x) {
  return reinterpret_cast<U32>(_mm512_cvtepi16_epi32(reinterpret_cast<__m256i>(x)));
}
inline U16 lower_halves(U32 x) {
  return reinterpret_cast<U16>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
}

inline F32 widen_half(U16 x) {
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(x));
}
inline U16 narrow_half(F32 x) {
  return reinterpret_cast<U16>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

inline __mmask16 mask_of(First part) {
  return static_cast<__mmask16>((1u << part.count) - 1);
}

inline F32 load(const float* from, First part) {
  return _mm512_maskz_loadu_ps(mask_of(part), from);
}
inline U16 load(const uint16_t* from, First part) {
  return reinterpret_cast<U16>(_mm256_maskz_loadu_epi16(mask_of(part), from));
}
inline U16 load(const Fp16* from, First part) {
  return load(reinterpret_cast<const uint16_t*>(from), part);
}
inline I16 load(const int16_t* from, First part) {
  return reinterpret_cast<I16>(_mm256_maskz_loadu_epi16(mask_of(part), from));
}
inline void store(float* to, F32 x, First part) {
  _mm512_mask_storeu_ps(to, mask_of(part), x);
}
inline void store(uint16_t* to, U16 x, First part) {
  _mm256_mask_storeu_epi16(to, mask_of(part), reinterpret_cast<__m256i>(x));
}
inline void store(Fp16* to, U16 x, First part) {
  store(reinterpret_cast<uint16_t*>(to), x, part);
}
inline void store(int16_t* to, I16 x, First part) {
  _mm256_mask_storeu_epi16(to, mask_of(part), reinterpret_cast<__m256i>(x));
}

#include "cpu_optim/kernels.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::optim::avx512
