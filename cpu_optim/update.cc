#include "cpu_optim/update.h"

#include "cpu_optim/dispatch.h"
#include "cpu_optim/floating_point.h"
#include "cpu_optim/passes.h"

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
  const UpdateKernel kernel = kernels().update_of(optimizer_of(factors), format, gradient.element);
  const FloatingPointMode mode;
  for_each_pass("update", format, piece, gradient, range, factors, [&](Pass& pass) {
    pass.prefetch = prefetch_cache();
    kernel(pass);
  });
}

}  // namespace overspill::optim
