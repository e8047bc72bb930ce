// What a device's kernels compute for one element: one source for GPUs and for the host, where the simulated
// device runs it and tests compare it with the CPU's. Nothing is contracted (-fmad=false,
// -ffp-contract=off); division and square root are correctly rounded; denormals are kept.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu_optim/half.h"
#include "cpu_optim/optimizers/state.h"

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

/// One number, as cpu_optim/optimizers/ computes with it.
struct Number {
  float x;

  Number() = default;
  OVERSPILL_HERE_AND_THERE Number(float value) : x(value) {}
  OVERSPILL_HERE_AND_THERE friend Number operator+(Number a, Number b) { return a.x + b.x; }
  OVERSPILL_HERE_AND_THERE friend Number operator-(Number a, Number b) { return a.x - b.x; }
  OVERSPILL_HERE_AND_THERE friend Number operator*(Number a, Number b) { return a.x * b.x; }
  OVERSPILL_HERE_AND_THERE friend Number operator/(Number a, Number b) { return a.x / b.x; }
};
OVERSPILL_HERE_AND_THERE inline Number fma(Number a, Number b, Number c) {
  return fmaf(a.x, b.x, c.x);
}
OVERSPILL_HERE_AND_THERE inline Number sqrt(Number x) {
  return sqrtf(x.x);
}
/// -1, 0 or 1; 0 for NaN.
OVERSPILL_HERE_AND_THERE inline Number sign(Number x) {
  return x.x > 0.0f ? 1.0f : x.x < 0.0f ? -1.0f : 0.0f;
}
OVERSPILL_HERE_AND_THERE inline Number abs(Number x) {
  return float_of(bits_of(x.x) & 0x7FFFFFFFu);
}
/// NaN where one of them is.
OVERSPILL_HERE_AND_THERE inline Number larger(Number a, Number b) {
  return a.x > b.x || a.x != a.x ? a : b;
}

// ---- elements of gradients, whatever they are stored as

OVERSPILL_HERE_AND_THERE inline float widen(float x) {
  return x;
}
OVERSPILL_HERE_AND_THERE inline float widen(uint16_t bf16) {
  return float_of(static_cast<uint32_t>(bf16) << 16);
}
OVERSPILL_HERE_AND_THERE inline float widen(optim::Fp16 half) {
  const uint32_t magnitude = (half.bits & 0x7FFFu) << 13;
  const uint32_t sign = (half.bits & 0x8000u) << 16;
  if (magnitude < 0x0F800000u) return float_of(bits_of(float_of(magnitude) * 0x1p112f) | sign);  // exact
  return float_of(magnitude | 0x7F800000u | (magnitude > 0x0F800000u ? 0x400000u : 0u) | sign);
}

/// To what is stored, nearest even; of a NaN comes a NaN.
OVERSPILL_HERE_AND_THERE inline void narrow(float x, float& to) {
  to = x;
}
OVERSPILL_HERE_AND_THERE inline void narrow(float x, uint16_t& bf16) {
  const uint32_t bits = bits_of(x);
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  bf16 = nan ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
OVERSPILL_HERE_AND_THERE inline void narrow(float x, optim::Fp16& to) {
  const uint32_t magnitude = bits_of(x) & 0x7FFFFFFFu;
  const uint32_t sign = (bits_of(x) ^ magnitude) >> 16;
  uint32_t half = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  if (magnitude < 0x38800000u) half = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;  // denormal
  if (magnitude >= 0x47800000u) half = 0x7C00u;
  if (magnitude > 0x7F800000u) half = ((magnitude >> 13) & 0x3FFu) | 0x7E00u;
  to.bits = static_cast<uint16_t>(half | sign);
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

/// One gradient's element after another: to = from where it is the first, else to += from.
template <class From, class To>
OVERSPILL_HERE_AND_THERE inline void take_in(From from, bool first, To& to) {
  narrow(first ? widen(from) : widen(to) + widen(from), to);
}
/// As it came: a NaN too.
template <class T>
OVERSPILL_HERE_AND_THERE inline void take_in(T from, bool first, T& to) {
  if (first) {
    to = from;
  } else {
    narrow(widen(to) + widen(from), to);
  }
}

}  // namespace overspill::kernels
