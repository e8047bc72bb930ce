// NEON, as every aarch64 has it: four lanes.
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "cpu_optim/dispatch.h"

namespace overspill::optim::neon {
namespace {

constexpr const char* kName = "neon";
constexpr int kLanes = 4;
#include "cpu_optim/vector.inl"
#include "cpu_optim/vector_convert.inl"
#include "cpu_optim/vector_partial.inl"

inline F32 fma(F32 a, F32 b, F32 c) {
  return reinterpret_cast<F32>(vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a),
                                         reinterpret_cast<float32x4_t>(b)));
}
inline F32 sqrt(F32 x) {
  return reinterpret_cast<F32>(vsqrtq_f32(reinterpret_cast<float32x4_t>(x)));
}
inline F64 low(F32 x) {
  return reinterpret_cast<F64>(vcvt_f64_f32(vget_low_f32(reinterpret_cast<float32x4_t>(x))));
}
inline F64 high(F32 x) {
  return reinterpret_cast<F64>(vcvt_high_f64_f32(reinterpret_cast<float32x4_t>(x)));
}

#include "cpu_optim/kernels.inl"

}  // namespace

extern const Kernels table;
const Kernels table = kTable;

}  // namespace overspill::optim::neon
