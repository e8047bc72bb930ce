// The scalar reference: what every form of the update must give, bit for bit, one element at a time with
// std::fma, written from the formulas in the header of the update and sharing no source with it. C interface,
// so that Python tests can load it with ctypes.
//
// Arrays belong to the caller and must not overlap; `n` counts elements. The caller's thread must round to
// nearest and keep denormals. No function fails or throws.
#pragma once

#include <stdint.h>

#define OVERSPILL_REFERENCE extern "C" __attribute__((visibility("default")))

/// The split master: bits = hi * 2^16 + lo modulo 2^32, hi rounded half up.
OVERSPILL_REFERENCE void reference_split(const uint32_t* bits, uint16_t* hi, int16_t* lo, int64_t n);
OVERSPILL_REFERENCE void reference_join(const uint16_t* hi, const int16_t* lo, uint32_t* bits, int64_t n);

/// One step of Adam (decoupled = 0) or AdamW (1). `grad` is bf16 bits (grad_is_bf16 = 1) or float (0). `step`
/// counts from 1.
OVERSPILL_REFERENCE void reference_adam_split(uint16_t* hi, int16_t* lo, float* m, float* v, const void* grad,
                                              int grad_is_bf16, int64_t n, double lr, double beta1,
                                              double beta2, double eps, double weight_decay, int decoupled,
                                              int64_t step, double grad_scale);
OVERSPILL_REFERENCE void reference_adam_fp32(float* p, float* m, float* v, const float* grad, int64_t n,
                                             double lr, double beta1, double beta2, double eps,
                                             double weight_decay, int decoupled, int64_t step,
                                             double grad_scale);

/// Sum of the squares of the finite elements, an extended-precision loop: compare with a tolerance. `*finite`
/// is 1 if all are finite.
OVERSPILL_REFERENCE double reference_squares(const void* x, int is_bf16, int64_t n, int* finite);
/// The same by the documented tree (blocks of 4096, 32 lanes, folded in halves): compare exactly.
OVERSPILL_REFERENCE double reference_tree_squares(const void* x, int is_bf16, int64_t n, int* finite);

/// bf16 conversions. reference_narrow rounds to nearest even; NaN becomes 0x7FC0.
OVERSPILL_REFERENCE float reference_widen(uint16_t bf16);
OVERSPILL_REFERENCE uint16_t reference_narrow(float x);
