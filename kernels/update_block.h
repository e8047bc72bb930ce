// The update of a block on a device in Format::eight_bit (docs/update.md): its states share a scale, which
// follows from the largest of them. So it has three steps: each element is updated, the largest is found,
// each element is coded. What is done to one element is here, who does it side by side is the backend's.
// cpu_optim/update.inl is the same for vectors of the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_optim/format.h"
#include "kernels/update_element.h"

namespace overspill::kernels {

/// Codes of a state: companded, with a sign or, of a sum of squares, without.
template <optim::Values kValues>
struct Code {
  static constexpr bool kSigned = kValues == optim::Values::any;
  static constexpr uint32_t kSegments = kSigned ? 8 : 16;                    // of 16 codes each
  static constexpr uint32_t kTopBits = kSigned ? 0x43770000u : 0x4777FF00u;  // 247 and 63487
  static constexpr uint32_t kOneBits = 0x3F800000u, kTwoBits = 0x40000000u;
  static constexpr int kCut = 19;  // bits of w that a code leaves out

  /// The biased exponent of the scale of a block whose largest magnitude has these bits.
  OVERSPILL_HERE_AND_THERE static uint32_t exponent(uint32_t largest) {
    if (largest >= 0x7F800000u) return 255;
    const uint32_t up = (largest + (0x7FFFFFu - (kTopBits & 0x7FFFFFu))) >> 23;
    return up > kSegments ? up - (kSegments - 1) : 1;
  }

  OVERSPILL_HERE_AND_THERE static float decode(uint8_t code, uint8_t exponent) {
    const float scale = float_of(uint32_t{exponent} << 23);
    const uint32_t twice = ((uint32_t{code} << kCut) & ((kSegments * 16 - 1) << kCut)) | kTwoBits;
    const float magnitude = fmaf(float_of(twice), scale * 0.5f, -scale);  // exact
    return kSigned ? float_of(bits_of(magnitude) | ((uint32_t{code} << 24) & 0x80000000u)) : magnitude;
  }

  /// Of a block that is finite; of `random` the kCut - 7 bits above the lower 7 are used.
  OVERSPILL_HERE_AND_THERE static uint8_t encode(float x, uint32_t exponent, uint32_t random) {
    constexpr uint32_t kDrawn = ((1u << kCut) - 1) & ~0x7Fu, kMiddle = 0x40u;
    const float inverse_scale = float_of((254u - exponent) << 23);
    const uint32_t magnitude = bits_of(x) & 0x7FFFFFFFu;
    uint32_t code =
        bits_of(fmaf(float_of(magnitude), inverse_scale, 1.0f)) + ((random & kDrawn) | (kMiddle - kOneBits));
    if (kSigned) code |= (bits_of(x) >> (24 - kCut)) & (0x80u << kCut);
    // A sum of squares is no zero to divide by.
    if (!kSigned && magnitude != 0 && code < (1u << kCut)) code = 1u << kCut;
    return static_cast<uint8_t>(code >> kCut);
  }
};

template <class T, class Gradient>
class UpdateBlock {
 public:
  static constexpr int kStates = T::kStateCount;

  explicit UpdateBlock(const optim::Pass& pass)
      : hi_(component<uint16_t>(pass, 0)),
        lo_(component<int8_t>(pass, 1)),
        gradient_(static_cast<const Gradient*>(pass.gradient)),
        factors_(*static_cast<const typename T::Factors*>(pass.factors)),
        grad_scale_(pass.grad_scale),
        noise_(pass.noise),
        word_((pass.noise.weyl >> 20) * 0x1001u + (pass.noise.weyl >> 24 << 24)),
        elements_(pass.elements),
        begin_(pass.begin),
        end_(pass.end) {
    for (int k = 0; k < kStates; ++k) codes_[k] = component<uint8_t>(pass, 2 + k);
  }

  /// What an element leaves for its block.
  struct Element {
    Number state[kStates + 1];
    uint32_t random;
  };
  /// By state: bits of the largest magnitude so far, then the exponent of the scale.
  struct Scales {
    uint32_t of[kStates + 1] = {};
  };

  /// Updates element i, in the piece or, in its last block, behind it, and writes its weight; outside the
  /// range nothing of it changes but, with the block's scale, its codes.
  OVERSPILL_HERE_AND_THERE Element update(int64_t i) const {
    Element element{};
    element.random = draw(noise_, word_, i);
    decode<0>(i, element.state);
    if (i < begin_ || i >= end_) return element;
    Number p = float_of((static_cast<uint32_t>(hi_[i]) << 16) +
                        (static_cast<uint32_t>(static_cast<int32_t>(lo_[i])) << 8));
    T::update(factors_, p, Number(widen(gradient_[i]) * grad_scale_), element.state);
    const uint32_t kept = p.x == p.x ? bits_of(p.x) + (element.random >> 24) : bits_of(p.x);
    hi_[i] = static_cast<uint16_t>((kept + 0x8000u) >> 16);
    lo_[i] = static_cast<int8_t>(static_cast<uint8_t>(kept >> 8));
    return element;
  }
  OVERSPILL_HERE_AND_THERE static void raise(Scales& largest, const Element& element) {
    for (int k = 0; k < kStates; ++k) {
      const uint32_t magnitude = bits_of(element.state[k].x) & 0x7FFFFFFFu;
      if (magnitude > largest.of[k]) largest.of[k] = magnitude;
    }
  }
  /// From the largest magnitudes of the whole block.
  OVERSPILL_HERE_AND_THERE static Scales scales_of(const Scales& largest) {
    Scales scales;
    set_exponents<0>(largest, scales);
    return scales;
  }
  OVERSPILL_HERE_AND_THERE void store_scales(int64_t block, const Scales& scales) const {
    for (int k = 0; k < kStates; ++k) codes_[k][elements_ + block] = static_cast<uint8_t>(scales.of[k]);
  }
  OVERSPILL_HERE_AND_THERE void store(int64_t i, const Element& element, const Scales& scales) const {
    if (i < elements_) encode<0>(i, element, scales);
  }

 private:
  template <int k>
  using CodeOf = Code<T::kStates[k].values>;

  template <int k>
  OVERSPILL_HERE_AND_THERE void decode(int64_t i, Number* state) const {
    if constexpr (k < kStates) {
      const uint8_t code = i < elements_ ? codes_[k][i] : uint8_t{0};
      state[k] = CodeOf<k>::decode(code, codes_[k][elements_ + i / optim::kScaleBlock]);
      decode<k + 1>(i, state);
    }
  }
  template <int k>
  OVERSPILL_HERE_AND_THERE static void set_exponents(const Scales& largest, Scales& scales) {
    if constexpr (k < kStates) {
      scales.of[k] = CodeOf<k>::exponent(largest.of[k]);
      set_exponents<k + 1>(largest, scales);
    }
  }
  template <int k>
  OVERSPILL_HERE_AND_THERE void encode(int64_t i, const Element& element, const Scales& scales) const {
    if constexpr (k < kStates) {
      const uint32_t random = k == 0 ? element.random << 7 : element.random >> 5;
      codes_[k][i] =
          scales.of[k] == 255 ? uint8_t{0} : CodeOf<k>::encode(element.state[k].x, scales.of[k], random);
      encode<k + 1>(i, element, scales);
    }
  }

  uint16_t* hi_;
  int8_t* lo_;
  uint8_t* codes_[kStates + 1] = {};
  const Gradient* gradient_;
  typename T::Factors factors_;
  float grad_scale_;
  optim::Noise noise_;
  uint32_t word_;
  int64_t elements_, begin_, end_;
};

}  // namespace overspill::kernels
