// The work that follows a read in a step, the same for every contender of bench/io/run.py: AdamW over the
// exact format, with weights and gradients on the host.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

/// Updates elements begin <= i < end of lo (2 bytes an element), m and v (4 each); hi and gradient are bf16,
/// of element 0 too. In a shared library for programs in other languages.
__attribute__((visibility("default"))) void overspill_consume(std::byte* hi, std::byte* lo, std::byte* m,
                                                              std::byte* v, const std::byte* gradient,
                                                              int64_t begin, int64_t end);
}
