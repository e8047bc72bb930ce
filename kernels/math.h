// What a device's kernels compute for one element: one source for GPUs and for the host, where the simulated
// device runs it and tests compare it with the CPU's update. Nothing is contracted (-fmad=false,
// -ffp-contract=off); division and square root are correctly rounded; denormals are kept.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/device_kernels.h"

#ifdef __CUDACC__
#define OVERSPILL_HERE_AND_THERE __host__ __device__
#else
#define OVERSPILL_HERE_AND_THERE
#endif

namespace overspill::kernels {

OVERSPILL_HERE_AND_THERE inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

OVERSPILL_HERE_AND_THERE inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/// fp32 to bf16, nearest even; a NaN becomes 0x7FC0.
OVERSPILL_HERE_AND_THERE inline uint16_t narrow(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

OVERSPILL_HERE_AND_THERE inline float widen(float x) {
  return x;
}
OVERSPILL_HERE_AND_THERE inline float widen(uint16_t bf16) {
  return float_of(static_cast<uint32_t>(bf16) << 16);
}

/// One lane of the tree of squares (cpu_optim/gradient.h): it adds its elements in order.
struct SquaresLane {
  double sum = 0;
  bool finite = true;

  OVERSPILL_HERE_AND_THERE void add(float x) {
    const bool bad = (bits_of(x) & 0x7F800000u) == 0x7F800000u;
    finite = finite && !bad;
    const double good = bad ? float_of(bits_of(x) & 0u) : x;
    sum += good * good;  // the square of a float is exact
  }
};

/// One gradient's element after another: to += from, or to = from where it is the first.
OVERSPILL_HERE_AND_THERE inline void take_in(float from, bool first, float& to) {
  to = first ? from : to + from;
}
OVERSPILL_HERE_AND_THERE inline void take_in(uint16_t from, bool first, float& to) {
  take_in(widen(from), first, to);
}
OVERSPILL_HERE_AND_THERE inline void take_in(uint16_t from, bool first, uint16_t& to) {
  to = first ? from : narrow(widen(to) + widen(from));
}

/// AdamW and Adam (cpu_optim/optimizers/adam.h).
OVERSPILL_HERE_AND_THERE inline void update_adam(const AdamFactors& f, float gradient, float& p, float& m,
                                                 float& v) {
  float g = gradient * f.grad_scale;
  if (f.l2 != 0.0f) g = fmaf(f.l2, p, g);
  p = p * f.decay;
  m = fmaf(f.one_minus_beta1, g - m, m);
  v = fmaf(f.one_minus_beta2, g * g, v * f.beta2);
  p = fmaf(f.minus_step_size, m / fmaf(sqrtf(v), f.inverse_sqrt_bias2, f.eps), p);
}

/// The same on the split master: bits = (hi << 16) + lo (DESIGN 3).
OVERSPILL_HERE_AND_THERE inline void update_adam(const AdamFactors& f, float gradient, uint16_t& hi,
                                                 int16_t& lo, float& m, float& v) {
  float p = float_of((static_cast<uint32_t>(hi) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo)));
  update_adam(f, gradient, p, m, v);
  const uint32_t bits = bits_of(p);
  hi = static_cast<uint16_t>((bits + 0x8000u) >> 16);
  lo = static_cast<int16_t>(static_cast<int32_t>(bits - (static_cast<uint32_t>(hi) << 16)));
}

}  // namespace overspill::kernels
