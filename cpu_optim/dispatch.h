// The forms of the kernels, one per instruction set, and the choice between them: made once, above the loops.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "cpu_optim/format.h"
#include "cpu_optim/gradient.h"
#include "cpu_optim/pass.h"

namespace overspill::optim {

using UpdateKernel = void (*)(const Pass& pass);

/// One instruction set's form of every kernel. `n` counts elements; sizes have been checked; pointers need
/// their element's alignment.
struct Kernels {
  const char* name;
  UpdateKernel update[kOptimizerCount][kFormatCount][kElementCount];
  Squares (*squares_bf16)(const uint16_t* x, int64_t n);
  Squares (*squares_fp16)(const Fp16* x, int64_t n);
  Squares (*squares_fp32)(const float* x, int64_t n);
  void (*widen_bf16)(const uint16_t* from, float* to, int64_t n);
  void (*widen_fp16)(const Fp16* from, float* to, int64_t n);
  void (*narrow_bf16)(const float* from, uint16_t* to, int64_t n);
  void (*narrow_fp16)(const float* from, Fp16* to, int64_t n);
  void (*accumulate_bf16_bf16)(const uint16_t* from, uint16_t* to, int64_t n);
  void (*accumulate_bf16_fp32)(const uint16_t* from, float* to, int64_t n);
  void (*accumulate_fp16_fp16)(const Fp16* from, Fp16* to, int64_t n);
  void (*accumulate_fp16_fp32)(const Fp16* from, float* to, int64_t n);
  void (*accumulate_fp32_fp32)(const float* from, float* to, int64_t n);
  void (*scale)(float* to, float factor, int64_t n);

  UpdateKernel update_of(Optimizer optimizer, Format format, Element gradient) const {
    return update[static_cast<int>(optimizer)][static_cast<int>(format)][static_cast<int>(gradient)];
  }
};

/// What this machine can run, narrowest first: "portable", then "neon" or "avx2" and "avx512". Never empty.
std::span<const Kernels* const> available_kernels();

/// The widest of them that `limit` allows; an empty limit allows all. Throws std::invalid_argument for a name
/// that is not a form.
const Kernels& choose_kernels(std::string_view limit);

/// What the front ends call: the choice under the environment variable OVERSPILL_ISA, read at the first call
/// and fixed from then on. Throws as choose_kernels.
const Kernels& kernels();

/// The name of that choice, for logs and reports.
std::string_view instruction_set();

/// What suits this machine's cores: the second level AMD's, the first any other.
Cache prefetch_cache();

}  // namespace overspill::optim
