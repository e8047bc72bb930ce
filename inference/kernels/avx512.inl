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

#include "inference/kernels/bytes.inl"

inline I32 load_integers(const int8_t* from) {
  return reinterpret_cast<I32>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Bytes repeat_16(const uint8_t* from) {
  return reinterpret_cast<Bytes>(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Bytes lookup(Bytes table, Bytes codes) {
  return reinterpret_cast<Bytes>(
      _mm512_shuffle_epi8(reinterpret_cast<__m512i>(table), reinterpret_cast<__m512i>(codes)));
}
inline Bytes zip_lower(Bytes a, Bytes b) {
  return reinterpret_cast<Bytes>(
      _mm512_unpacklo_epi8(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
inline Bytes zip_upper(Bytes a, Bytes b) {
  return reinterpret_cast<Bytes>(
      _mm512_unpackhi_epi8(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
