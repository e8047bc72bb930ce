// AVX-512 F, BW, DQ, VL.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "cpu_optim/half.h"
#include "inference/kernels/coded.h"
#include "inference/kernels/forms.h"
#include "inference/kernels/int8.h"

namespace overspill::inference::avx512 {
namespace {

using optim::Fp16;
constexpr const char* kName = "avx512";
constexpr int kLanes = 16;
#include "cpu_optim/vector.inl"
#include "inference/kernels/avx512.inl"
#include "inference/kernels/pairs.inl"

constexpr int kTileVectors = 6;  // vectors that are multiplied together
constexpr int kTileWidth = 4;    // registers of rows beside them
constexpr int kAttentionRows = 8;
constexpr int64_t kPrefetchBytes = 4096;  // ahead of a product that waits for memory
#include "inference/kernels/forms.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::inference::avx512
