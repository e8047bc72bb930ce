// The update of one element on a device: how formats hold weights and states (docs/update.md), but for
// Format::eight_bit, whose elements share scales (update_block.h). cpu_optim/formats.inl is the same for
// vectors of the CPU; what happens to an element in between is one source for both, cpu_optim/optimizers/.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_optim/optimizer.h"
#include "cpu_optim/pass.h"
#include "kernels/math.h"

namespace overspill::kernels {

template <class T>
T* component(const optim::Pass& pass, int i) {
  return reinterpret_cast<T*>(pass.components[i]);
}

// ---- weights

struct Fp32Weights {
  static constexpr int kComponents = 1;
  float* p;

  explicit Fp32Weights(const optim::Pass& pass) : p(component<float>(pass, 0)) {}
  OVERSPILL_HERE_AND_THERE Number load(int64_t i) const { return p[i]; }
  OVERSPILL_HERE_AND_THERE void store(int64_t i, Number x) const { p[i] = x.x; }
};

/// The split master: bits = (hi << 16) + lo (docs/update.md).
struct SplitWeights {
  static constexpr int kComponents = 2;
  uint16_t* hi;
  int16_t* lo;

  explicit SplitWeights(const optim::Pass& pass)
      : hi(component<uint16_t>(pass, 0)), lo(component<int16_t>(pass, 1)) {}
  OVERSPILL_HERE_AND_THERE Number load(int64_t i) const {
    return float_of((static_cast<uint32_t>(hi[i]) << 16) +
                    static_cast<uint32_t>(static_cast<int32_t>(lo[i])));
  }
  OVERSPILL_HERE_AND_THERE void store(int64_t i, Number x) const {
    const uint32_t bits = bits_of(x.x);
    hi[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    lo[i] = static_cast<int16_t>(static_cast<uint16_t>(bits));  // what hi << 16 leaves alone
  }
};

/// fp16 for forward, written only, beside the fp32 master.
struct Fp16Weights {
  static constexpr int kComponents = 2;
  optim::Fp16* p16;
  float* master;

  explicit Fp16Weights(const optim::Pass& pass)
      : p16(component<optim::Fp16>(pass, 0)), master(component<float>(pass, 1)) {}
  OVERSPILL_HERE_AND_THERE Number load(int64_t i) const { return master[i]; }
  OVERSPILL_HERE_AND_THERE void store(int64_t i, Number x) const {
    narrow(x.x, p16[i]);
    master[i] = x.x;
  }
};

// ---- states

template <int kCount>
struct Fp32States {
  float* state[kCount + 1] = {};  // no array is empty

  Fp32States(const optim::Pass& pass, int first) {
    for (int k = 0; k < kCount; ++k) state[k] = component<float>(pass, first + k);
  }
  OVERSPILL_HERE_AND_THERE void load(int64_t i, Number* values) const {
    for (int k = 0; k < kCount; ++k) values[k] = state[k][i];
  }
  OVERSPILL_HERE_AND_THERE void store(int64_t i, const Number* values) const {
    for (int k = 0; k < kCount; ++k) state[k][i] = values[k].x;
  }
};

/// The draw of an element of the piece (cpu_optim/pass.h), moved on by the step's `word`.
OVERSPILL_HERE_AND_THERE inline uint32_t draw(const optim::Noise& noise, uint32_t word, int64_t i) {
  uint32_t x = (noise.index + static_cast<uint32_t>(i)) ^ noise.key0;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x += noise.key1;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x + word;
}

/// bf16 with stochastic rounding: 16 random bits are added below the last that is kept, the rest is cut off.
/// To a NaN nothing is added.
template <int kCount>
struct Bf16States {
  static_assert(kCount <= 2, "a draw has 32 bits");
  uint16_t* state[kCount + 1] = {};
  optim::Noise noise;
  uint32_t word;  // of two fields of 16 bits

  Bf16States(const optim::Pass& pass, int first)
      : noise(pass.noise), word((pass.noise.weyl >> 16) * 0x10001u) {
    for (int k = 0; k < kCount; ++k) state[k] = component<uint16_t>(pass, first + k);
  }
  OVERSPILL_HERE_AND_THERE void load(int64_t i, Number* values) const {
    for (int k = 0; k < kCount; ++k) values[k] = widen(state[k][i]);
  }
  OVERSPILL_HERE_AND_THERE void store(int64_t i, const Number* values) const {
    const uint32_t random = draw(noise, word, i);
    for (int k = 0; k < kCount; ++k) {
      const float x = values[k].x;
      const uint32_t added = x == x ? (k == 0 ? random & 0xFFFFu : random >> 16) : 0;
      state[k][i] = static_cast<uint16_t>((bits_of(x) + added) >> 16);
    }
  }
};

// ---- the update

template <class T, class Weights, class States, class Gradient>
struct UpdateElement {
  Weights weights;
  States states;
  const Gradient* gradient;
  typename T::Factors factors;
  float grad_scale;

  explicit UpdateElement(const optim::Pass& pass)
      : weights(pass),
        states(pass, Weights::kComponents),
        gradient(static_cast<const Gradient*>(pass.gradient)),
        factors(*static_cast<const typename T::Factors*>(pass.factors)),
        grad_scale(pass.grad_scale) {}

  OVERSPILL_HERE_AND_THERE void operator()(int64_t i) const {
    Number p = weights.load(i);
    Number state[T::kStateCount + 1];
    states.load(i, state);
    T::update(factors, p, Number(widen(gradient[i]) * grad_scale), state);
    weights.store(i, p);
    states.store(i, state);
  }
};

}  // namespace overspill::kernels
