#include "cpu_optim/update.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_optim/dispatch.h"
#include "cpu_optim/floating_point.h"
#include "cpu_optim/piece_check.h"

namespace overspill::optim {
namespace {

// The mixer of SplitMix64 (Steele, Lea and Flood 2014).
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

Noise make_noise(uint64_t seed, int64_t index, int64_t step) {
  const uint64_t key = mix(mix(seed) ^ (static_cast<uint64_t>(index) >> 32));
  return {.key0 = static_cast<uint32_t>(key),
          .key1 = static_cast<uint32_t>(key >> 32),
          .weyl = static_cast<uint32_t>(step) * 0x9E3779B9u,
          .index = static_cast<uint32_t>(index)};
}

void update(Format format, const Piece& piece, Gradient gradient, Range range, const Factors& factors) {
  const Optimizer optimizer{static_cast<uint8_t>(factors.of.index())};
  check_piece("update", optimizer, format, piece, range);
  if (gradient.data == nullptr && range.begin < range.end) {
    throw std::invalid_argument("update: there is no gradient");
  }
  const UpdateKernel kernel = kernels().update_of(optimizer, format, gradient.element);
  const FloatingPointMode mode;
  Pass pass{.components = piece.components.data(),
            .gradient = gradient.data,
            .elements = piece.elements,
            .begin = range.begin,
            .end = range.end,
            .factors = std::visit([](const auto& f) -> const void* { return &f; }, factors.of),
            .grad_scale = factors.grad_scale,
            .noise = {},
            .prefetch = prefetch_cache()};
  // One call for each value of the index's upper half; a piece hardly ever has two.
  while (pass.begin < range.end) {
    const int64_t first = piece.index + pass.begin;
    const int64_t next_upper = ((first >> 32) + 1) << 32;
    pass.end = std::min(range.end, next_upper - piece.index);
    pass.noise = make_noise(piece.seed, first, factors.step);
    pass.noise.index = static_cast<uint32_t>(piece.index);
    kernel(pass);
    pass.begin = pass.end;
  }
}

}  // namespace overspill::optim
