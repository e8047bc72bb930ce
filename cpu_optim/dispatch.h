// The forms of the kernels, one per instruction set, and the choice between them: made once, above the loops.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "cpu_optim/adam.h"
#include "cpu_optim/gradient.h"

namespace overspill::optim {

/// One instruction set's form of every kernel. Raw pointers, because what these files instantiate must not be
/// shared with files that are compiled for another instruction set. `n` counts elements; sizes have been
/// checked; pointers need their element's alignment.
struct Kernels {
  const char* name;
  void (*adam_split_bf16)(uint16_t* hi, int16_t* lo, float* m, float* v, const uint16_t* grad, int64_t n,
                          const AdamFactors& factors);
  void (*adam_split_fp32)(uint16_t* hi, int16_t* lo, float* m, float* v, const float* grad, int64_t n,
                          const AdamFactors& factors);
  void (*adam_fp32)(float* p, float* m, float* v, const float* grad, int64_t n, const AdamFactors& factors);
  Squares (*squares_bf16)(const uint16_t* x, int64_t n);
  Squares (*squares_fp32)(const float* x, int64_t n);
  void (*widen)(const uint16_t* from, float* to, int64_t n);
  void (*narrow)(const float* from, uint16_t* to, int64_t n);
  void (*accumulate_bf16_bf16)(const uint16_t* from, uint16_t* to, int64_t n);
  void (*accumulate_bf16_fp32)(const uint16_t* from, float* to, int64_t n);
  void (*accumulate_fp32_fp32)(const float* from, float* to, int64_t n);
  void (*scale)(float* to, float factor, int64_t n);
};

/// What this machine can run, narrowest first: "portable", "avx2", "avx512". Never empty.
std::span<const Kernels* const> available_kernels();

/// The widest of them that `limit` allows; an empty limit allows all. Throws std::invalid_argument for a name
/// that is not a form.
const Kernels& choose_kernels(std::string_view limit);

/// What the front ends call: the choice under the environment variable OVERSPILL_ISA, read at the first call
/// and fixed from then on. Throws as choose_kernels.
const Kernels& kernels();

/// The name of that choice, for logs and reports.
std::string_view instruction_set();

}  // namespace overspill::optim
