// AVX-512 with BF16.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpu_optim/half.h"
#include "inference/kernels/coded.h"
#include "inference/kernels/forms.h"
#include "inference/kernels/int8.h"

namespace overspill::inference::avx512bf16 {
namespace {

using optim::Fp16;
constexpr const char* kName = "avx512bf16";
constexpr int kLanes = 16;
#include "cpu_optim/vector.inl"
#include "inference/kernels/avx512.inl"

// VDPBF16PS multiplies a pair of columns at once.
struct Pairs {
  using Element = uint16_t;
  static constexpr int64_t kColumns = 2;
  U32 bits;

  static Pairs load_from(const uint16_t* from) {
    Pairs pairs;
    __builtin_memcpy(&pairs.bits, from, sizeof(pairs.bits));
    return pairs;
  }
  static U32 broadcast_from(const uint16_t* from) {
    uint32_t pair;
    __builtin_memcpy(&pair, from, sizeof(pair));
    return broadcast(pair);
  }
  static F32 multiply_add(Pairs weights, U32 factor, F32 sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights.bits),
                            reinterpret_cast<__m512bh>(factor));
  }
};

constexpr int kTileVectors = 6;  // vectors that are multiplied together
constexpr int kTileWidth = 4;    // registers of rows beside them
constexpr int kAttentionRows = 8;
constexpr int64_t kPrefetchBytes = 4096;  // ahead of a product that waits for memory
#include "inference/kernels/forms.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::inference::avx512bf16
