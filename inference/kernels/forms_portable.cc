// Any machine, by the compilers' vector extension.

#include <cstddef>
#include <cstdint>

#include "cpu_optim/half.h"
#include "inference/kernels/forms.h"

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
