// AVX2 with FMA.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpu_optim/half.h"
#include "inference/kernels/coded.h"
#include "inference/kernels/forms.h"
#include "inference/kernels/int8.h"

namespace overspill::inference::avx2 {
namespace {

using optim::Fp16;
constexpr const char* kName = "avx2";
constexpr int kLanes = 8;
#include "cpu_optim/vector.inl"

inline F32 fma(F32 a, F32 b, F32 c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline U32 extend(U16 x) {
  return reinterpret_cast<U32>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(x)));
}
inline U16 lower_halves(U32 x) {
  const __m256i packed = _mm256_packus_epi32(reinterpret_cast<__m256i>(x), _mm256_setzero_si256());
  return reinterpret_cast<U16>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}

#include "inference/kernels/bytes.inl"

inline I32 load_integers(const int8_t* from) {
  return reinterpret_cast<I32>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Bytes repeat_16(const uint8_t* from) {
  return reinterpret_cast<Bytes>(
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Bytes lookup(Bytes table, Bytes codes) {
  return reinterpret_cast<Bytes>(
      _mm256_shuffle_epi8(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(codes)));
}
inline Bytes zip_lower(Bytes a, Bytes b) {
  return reinterpret_cast<Bytes>(
      _mm256_unpacklo_epi8(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
inline Bytes zip_upper(Bytes a, Bytes b) {
  return reinterpret_cast<Bytes>(
      _mm256_unpackhi_epi8(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

#include "inference/kernels/pairs.inl"

constexpr int kTileVectors = 4;  // vectors that are multiplied together
constexpr int kTileWidth = 2;    // registers of rows beside them
constexpr int kAttentionRows = 4;
constexpr int64_t kPrefetchBytes = 4096;  // ahead of a product that waits for memory
#include "inference/kernels/forms.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::inference::avx2
