// Plain C++ on the compilers' vector extension: the baseline of any machine, without a fused multiply-add
// instruction.
#include <cstddef>
#include <cstdint>

#include "cpu_optim/dispatch.h"

namespace overspill::optim::portable {
namespace {

constexpr const char* kName = "portable";
constexpr int kLanes = 4;
#include "cpu_optim/vector.inl"
#include "cpu_optim/vector_convert.inl"
#include "cpu_optim/vector_partial.inl"

typedef int64_t I64 __attribute__((vector_size(16)));
typedef float F32Half __attribute__((vector_size(8)));

inline F64 low(F32 x) {
  return __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1), F64);
}
inline F64 high(F32 x) {
  return __builtin_convertvector(__builtin_shufflevector(x, x, 2, 3), F64);
}
// a * b + c rounded to odd: the product of two floats is exact in double, the sum's error is exact too
// (Knuth's TwoSum). Rounded to odd it may be rounded again, to float, as if it had been rounded once (Boldo
// and Melquiond 2008, doi 10.1109/TC.2007.70819).
inline F64 fma_odd(F64 a, F64 b, F64 c) {
  const F64 product = a * b;
  const F64 sum = product + c;
  const F64 c_part = sum - product;
  const F64 error = (product - (sum - c_part)) + (c - c_part);
  const I64 inexact = (error < 0) | (error > 0);  // false where the sum is inf or NaN
  const I64 away_from_zero = (error < 0) ^ (sum < 0);
  const I64 truncated = reinterpret_cast<I64>(sum) + (inexact & away_from_zero);  // a mask is -1
  return reinterpret_cast<F64>(truncated | (inexact & 1));
}

inline F32 fma(F32 a, F32 b, F32 c) {
  const F32Half x = __builtin_convertvector(fma_odd(low(a), low(b), low(c)), F32Half);
  const F32Half y = __builtin_convertvector(fma_odd(high(a), high(b), high(c)), F32Half);
  return __builtin_shufflevector(x, y, 0, 1, 2, 3);
}

inline F32 sqrt(F32 x) {
  return F32{__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]), __builtin_sqrtf(x[3])};
}

#include "cpu_optim/kernels.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::optim::portable
