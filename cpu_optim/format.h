// Formats: how weights and states are held. What an optimizer needs in a format is a list of components, each
// one contiguous run of bytes, so that a layout can place them without knowing what they mean.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "cpu_optim/optimizer.h"

namespace overspill::optim {

enum class Format : uint8_t {
  fp32,     // p 4; states 4 each
  exact,    // hi 2, lo 2: the split master (split.h); states 4 each. Bit-equal to fp32 followed by the split
  fp16,     // p16 2, master 4; states 4 each. Loss scaling is grad_scale
  compact,  // hi 2, lo 2; states bf16 2 each, stochastic rounding
  eight_bit,  // hi 2, lo 1: a master of 24 bits; states 1 each and a scale a block; stochastic rounding
};
constexpr int kFormatCount = 5;
std::string_view name(Format format);        // "fp32", "exact", "fp16", "compact", "8bit"
Format format_named(std::string_view name);  // throws std::invalid_argument

/// What an element of a gradient is.
enum class Element : uint8_t { bf16, fp16, fp32 };
constexpr int kElementCount = 3;
constexpr int64_t bytes(Element element) {
  return element == Element::fp32 ? 4 : 2;
}

/// Elements that share a scale, in Format::eight_bit. Pieces of a unit start at multiples of it.
constexpr int64_t kScaleBlock = 64;

enum class Role : uint8_t {
  weight,  // what forward uses; always the first component
  master,  // what is missing to the exact weight
  state,
};

struct ComponentSpec {
  std::string_view name;
  Role role;
  int element_bytes;
  bool scaled;  // a byte of scale for each block follows the elements
  int state;    // which of the optimizer's states, -1 for weights

  /// Of `n` elements: n elements, then, where `scaled`, ceil(n / kScaleBlock) scales.
  constexpr int64_t bytes(int64_t n) const {
    return n * element_bytes + (scaled ? (n + kScaleBlock - 1) / kScaleBlock : 0);
  }
};

/// In the order that updates expect. The list lives as long as the program.
std::span<const ComponentSpec> components(Optimizer optimizer, Format format);
constexpr int kComponentsMax = 4;

}  // namespace overspill::optim
