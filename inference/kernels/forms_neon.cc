// NEON, part of every aarch64.
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "cpu_optim/half.h"
#include "inference/kernels/coded.h"
#include "inference/kernels/forms.h"
#include "inference/kernels/int8.h"

namespace overspill::inference::neon {
namespace {

using optim::Fp16;
constexpr const char* kName = "neon";
constexpr int kLanes = 4;
#include "cpu_optim/vector.inl"

inline F32 fma(F32 a, F32 b, F32 c) {
  return reinterpret_cast<F32>(vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a),
                                         reinterpret_cast<float32x4_t>(b)));
}
inline U32 extend(U16 x) {
  return __builtin_convertvector(x, U32);
}
inline U16 lower_halves(U32 x) {
  return __builtin_convertvector(x, U16);
}

#include "inference/kernels/bytes_16.inl"

inline Bytes lookup(Bytes table, Bytes codes) {
  return reinterpret_cast<Bytes>(
      vqtbl1q_u8(reinterpret_cast<uint8x16_t>(table), reinterpret_cast<uint8x16_t>(codes)));
}
inline Bytes zip_lower(Bytes a, Bytes b) {
  return reinterpret_cast<Bytes>(vzip1q_u8(reinterpret_cast<uint8x16_t>(a), reinterpret_cast<uint8x16_t>(b)));
}
inline Bytes zip_upper(Bytes a, Bytes b) {
  return reinterpret_cast<Bytes>(vzip2q_u8(reinterpret_cast<uint8x16_t>(a), reinterpret_cast<uint8x16_t>(b)));
}

#include "inference/kernels/pairs.inl"

constexpr int kTileVectors = 4;  // vectors that are multiplied together
constexpr int kTileWidth = 4;    // registers of rows beside them
constexpr int kAttentionRows = 4;
constexpr int64_t kPrefetchBytes = 4096;  // ahead of a product that waits for memory
#include "inference/kernels/forms.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::inference::neon
