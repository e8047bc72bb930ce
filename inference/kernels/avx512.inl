// What the forms for AVX-512 have in common, with BF16 and without.
inline F32 fma(F32 a, F32 b, F32 c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline U32 extend(U16 x) {
  return reinterpret_cast<U32>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x)));
}
inline U16 lower_halves(U32 x) {
  return reinterpret_cast<U16>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
}
