// Loops that only read and write the streams of an update: the limit that memory sets. In several forms,
// because none is the fastest everywhere; the fastest counts (bench/adam/run.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu_optim/format.h"

namespace overspill::bench {

/// Over elements [begin, end), multiples of 1024: reads the gradient, reads and writes each component, as
/// Adam's update in that format does (scales of blocks, 1.6 % of 8 bits, are left out).
using Limit = void (*)(std::byte* const* components, const std::byte* gradient, int64_t begin, int64_t end);

struct LimitForm {
  const char* name;
  Limit of[optim::kFormatCount];  // gradients: fp32 of fp32, otherwise of 2 bytes
};

/// Those that this processor can run.
std::span<const LimitForm> limit_forms();

}  // namespace overspill::bench
