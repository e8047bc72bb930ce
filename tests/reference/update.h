// The scalar reference of the family: every optimizer in every format, one element at a time with std::fma,
// written from docs/update.md and sharing no source with the kernels. C interface, for Python's ctypes too.
#pragma once

#include <stdint.h>

#include "tests/reference/reference.h"

/// One update of the elements begin to end (exclusive) of a piece, bit for bit (a NaN's payload aside). Does
/// nothing and returns 0 for a name it does not know, else returns 1.
///
/// optimizer  hyper, in this order
/// adam       lr, beta1, beta2, eps, weight_decay, decoupled (0 or 1)
/// adagrad    lr, lr_decay, weight_decay, eps
/// lion       lr, beta1, beta2, weight_decay
/// momentum   lr, momentum, dampening, weight_decay, nesterov (0 or 1)
/// sgd        lr, weight_decay
/// rmsprop    lr, alpha, eps, weight_decay
/// rmsprop_momentum  lr, alpha, eps, weight_decay, momentum
/// nadam      lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled (0 or 1)
/// adamax     lr, beta1, beta2, eps, weight_decay
/// adadelta   lr, rho, eps, weight_decay
///
/// format     "fp32", "exact", "fp16", "compact" or "8bit"; `components` in the order that the update takes
/// them gradient   "bf16", "fp16" or "fp32"; `grad` points at the gradient of the piece's first element
/// grad_scale negative to maximize
/// seed, index, step: of the stochastic rounding; step counts from 1
OVERSPILL_REFERENCE int reference_update(const char* optimizer, const char* format, void* const* components,
                                         const char* gradient, const void* grad, int64_t elements,
                                         int64_t begin, int64_t end, const double* hyper, int64_t step,
                                         double grad_scale, uint64_t seed, int64_t index);

/// Whether a state, counted from 0, may be below zero: then its 8-bit codes have a sign.
OVERSPILL_REFERENCE int reference_is_signed(const char* optimizer, int state);

/// fp16 conversions; to fp16 rounds to nearest even, a NaN stays one.
OVERSPILL_REFERENCE float reference_widen_half(uint16_t fp16);
OVERSPILL_REFERENCE uint16_t reference_narrow_half(float x);

/// The 32 random bits of an element, moved on by the step: fields of 16 + 16 bits (`eight_bit` 0), or from
/// below of 12 + 12 + 8 (1). Step 0 moves nothing.
OVERSPILL_REFERENCE uint32_t reference_noise(uint64_t seed, int64_t index, int64_t step, int eight_bit);

/// The value of an 8-bit code. `is_signed`: 8 segments and a sign, else 16 segments.
OVERSPILL_REFERENCE float reference_decode(uint8_t code, uint8_t exponent, int is_signed);
