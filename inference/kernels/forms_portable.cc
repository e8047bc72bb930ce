// Any machine, by the compilers' vector extension.

#include <cstddef>
#include <cstdint>

#include "cpu_optim/half.h"
#include "inference/kernels/coded.h"
#include "inference/kernels/forms.h"
#include "inference/kernels/int8.h"

namespace overspill::inference::portable {
namespace {

using optim::Fp16;
constexpr const char* kName = "portable";
constexpr int kLanes = 4;
#include "cpu_optim/vector.inl"

// Not fused: a function of the C library for each lane would take most of the time.
inline F32 fma(F32 a, F32 b, F32 c) {
  return a * b + c;
}
inline U32 extend(U16 x) {
  return __builtin_convertvector(x, U32);
}
inline U16 lower_halves(U32 x) {
  return __builtin_convertvector(x, U16);
}

#include "inference/kernels/bytes_16.inl"

inline Bytes lookup(Bytes table, Bytes codes) {
  Bytes found;
  for (size_t i = 0; i < sizeof(Bytes); ++i) found[i] = table[codes[i]];
  return found;
}
inline Bytes zip_lower(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Bytes zip_upper(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

#include "inference/kernels/pairs.inl"

constexpr int kTileVectors = 2;  // vectors that are multiplied together
constexpr int kTileWidth = 2;    // registers of rows beside them
constexpr int kAttentionRows = 2;
constexpr int64_t kPrefetchBytes = 4096;  // ahead of a product that waits for memory
#include "inference/kernels/forms.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::inference::portable
