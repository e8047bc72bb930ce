// The fused pass. Part of kernels.inl.

// What each way to go through memory asks for ahead, measured beside the loops that only read and write the
// same streams (docs/update.md): the first two on a Zen 4 core, the third on Cascade Lake.
using LineAhead = Ahead<kLanes, 1024, Cache::second_level>;
using BurstAhead = Ahead<128, 2048, Cache::second_level>;
using NearAhead = Ahead<32, 2048, Cache::first_level>;
using PairAhead = Ahead<2 * kLanes, 1024, Cache::first_level>;
using BlockAhead = Ahead<kScaleBlock, 1024, Cache::first_level>;

template <class T, class Weights, class States, class Grad, class Where>
inline void update_elements(const Pass& pass) {
  const typename T::Factors factors = *static_cast<const typename T::Factors*>(pass.factors);
  const Weights weights(pass);
  const States states(pass, Weights::kComponents);
  const Grad* grad = static_cast<const Grad*>(pass.gradient);
  const float grad_scale = pass.grad_scale;
  const auto update_at = [=](int64_t i, auto part) {
    V p = weights.load_at(i, part);
    V state[T::kStateCount + 1];
    states.load_at(i, state, part);
    T::update(factors, p, V(load_values(grad + i, part) * grad_scale), state);
    weights.store_at(i, p.x, part);
    states.store_at(i, state, part);
  };
  int64_t i = pass.begin;
  for (; i + Where::kElements <= pass.end; i += Where::kElements) {
    weights.template ask_at<Where>(i);
    states.template ask_at<Where>(i);
    Where::ask(grad, i);
    for (int k = 0; k < Where::kElements; k += kLanes) update_at(i + k, All{});
  }
  for_each_vector(i, pass.end, update_at);
}

template <class T, class Weights, class States, class Grad, class FarAhead>
inline void update_streams(const Pass& pass) {
  if (pass.prefetch == Cache::second_level) {
    update_elements<T, Weights, States, Grad, FarAhead>(pass);
  } else {
    update_elements<T, Weights, States, Grad, NearAhead>(pass);
  }
}

// The same where all components have 2 bytes an element: two vectors at a time (interleave.inl).
template <class T, class Weights, class States, class Grad>
inline void update_pairs(const Pass& pass) {
  const typename T::Factors factors = *static_cast<const typename T::Factors*>(pass.factors);
  const Weights weights(pass);
  const States states(pass, Weights::kComponents);
  const Grad* grad = static_cast<const Grad*>(pass.gradient);
  const float grad_scale = pass.grad_scale;
  constexpr int kAtATime = 2 * kLanes;
  Pass rest = pass;
  for (int64_t i = pass.begin; i + kAtATime <= pass.end; i += kAtATime) {
    weights.template ask_at<PairAhead>(i);
    states.template ask_at<PairAhead>(i);
    PairAhead::ask(grad, i);
    const Pair p = weights.load_pair_at(i), g = load_pair(grad + i);
    V even = p.even, odd = p.odd;
    V even_state[T::kStateCount + 1], odd_state[T::kStateCount + 1];
    states.load_pair_at(i, even_state, odd_state);
    T::update(factors, even, V(g.even * grad_scale), even_state);
    T::update(factors, odd, V(g.odd * grad_scale), odd_state);
    weights.store_pair_at(i, {even.x, odd.x});
    states.store_pair_at(i, even_state, odd_state);
    rest.begin = i + kAtATime;
  }
  update_elements<T, Weights, States, Grad, PairAhead>(rest);
}

// Format::eight_bit, a block of kScaleBlock elements at a time: states are decoded, updated and kept until
// the largest of them is known, then coded. Blocks that are cut (by the range, or by the end of the piece) go
// through a copy of full length, so the body knows whole blocks only.
template <class T, class Grad>
class BlockUpdate {
  static constexpr int kStates = T::kStateCount;
  static constexpr int kVectors = static_cast<int>(kScaleBlock) / kLanes, kQuads = kVectors / 4;

 public:
  explicit BlockUpdate(const Pass& pass)
      : pass_(pass),
        factors_(*static_cast<const typename T::Factors*>(pass.factors)),
        noise_(block_noise(pass.noise)),
        grad_(static_cast<const Grad*>(pass.gradient)),
        grad_scale_(pass.grad_scale),
        hi_(component<uint16_t>(pass, 0)),
        lo_(component<int8_t>(pass, 1)) {
    for (int k = 0; k < kStates; ++k) codes_[k] = component<uint8_t>(pass, 2 + k);
  }

  void run() const {
    for (int64_t at = pass_.begin / kScaleBlock * kScaleBlock; at < pass_.end; at += kScaleBlock) {
      List<uint8_t*, kStates> codes, scales;
      for (int k = 0; k < kStates; ++k) {
        codes[k] = codes_[k] + at;
        scales[k] = codes_[k] + pass_.elements + at / kScaleBlock;
      }
      if (at >= pass_.begin && at + kScaleBlock <= pass_.end) {
        ask_at(at);
        whole_block(at, hi_ + at, lo_ + at, grad_ + at, codes, scales, AllInside{});
      } else {
        cut_block(at, codes, scales);
      }
    }
  }

 private:
  struct AllInside {
    static V only_inside(int, V updated, V) { return updated; }
  };
  struct SomeInside {
    uint32_t begin, end;
    V only_inside(int first, V updated, V old) const {
      const U32 lane = AllLanes::kNumbers * 2u + static_cast<uint32_t>(first);
      const U32 inside = mask_of(lane >= begin) & mask_of(lane < end);
      return from_bits(choose(inside, bits_of(updated.x), bits_of(old.x)));
    }
  };

  __attribute__((always_inline)) void ask_at(int64_t i) const {
    BlockAhead::ask(hi_, i);
    BlockAhead::ask(grad_, i);
    BlockAhead::ask(lo_, i);
    for (int k = 0; k < kStates; ++k) BlockAhead::ask(codes_[k], i);
  }

  template <int k>
  using CodeOf = Code<T::kStates[k].values>;
  using States = List<V, kStates>;

  struct Decoded {
    List<U32, kStates> codes;  // of a quad
    List<F32, kStates> scale, half_scale;
  };
  struct Updated {
    List<States, kVectors> states;
    List<U32, kVectors> random;
    List<U32, kStates> largest{};
  };
  // The first element of vector j of a quad; the lanes have every second one from there on.
  static constexpr int first_of(int j) { return j / 2 * 2 * kLanes + j % 2; }

  template <class Inside>
  inline void whole_block(int64_t at, uint16_t* hi, int8_t* lo, const Grad* grad,
                          const List<uint8_t*, kStates>& codes, const List<uint8_t*, kStates>& scales,
                          Inside inside) const {
    Decoded old;
    for (int k = 0; k < kStates; ++k) {
      old.scale[k] = from_bits(broadcast(uint32_t{*scales[k]} << 23));
      old.half_scale[k] = old.scale[k] * 0.5f;
    }
    Updated updated;
#pragma GCC unroll 4
    for (int q = 0; q < kQuads; ++q) {
      const int i = q * 4 * kLanes;
      const Pair hi0 = load_pair(hi + i), hi1 = load_pair(hi + i + 2 * kLanes);
      const Pair grad0 = load_pair(grad + i), grad1 = load_pair(grad + i + 2 * kLanes);
      const U32 lo4 = load_quad(lo + i) ^ 0x80808080u;
      for (int k = 0; k < kStates; ++k) old.codes[k] = load_quad(codes[k] + i);
      const U32 kept0 = update_vector<0>(at, i, hi0.even, lo4, grad0.even, old, updated, inside);
      const U32 kept1 = update_vector<1>(at, i, hi0.odd, lo4, grad0.odd, old, updated, inside);
      const U32 kept2 = update_vector<2>(at, i, hi1.even, lo4, grad1.even, old, updated, inside);
      const U32 kept3 = update_vector<3>(at, i, hi1.odd, lo4, grad1.odd, old, updated, inside);
      store_lanes(hi + i, upper_halves(kept0 + 0x8000u, kept1 + 0x8000u));
      store_lanes(hi + i + 2 * kLanes, upper_halves(kept2 + 0x8000u, kept3 + 0x8000u));
      store_quad(lo + i, kept0 >> 8, kept1, kept2 << 8, kept3 << 16);
    }
    encode_all<0>(updated, codes, scales);
  }

  // The weight's bits; all but their lower byte are kept. `hi` is the upper half of the weight as split.h has
  // it, to which the byte of `lo`, with its sign turned, adds as one without a sign.
  template <int j, class Inside>
  inline U32 update_vector(int64_t at, int i, F32 hi, U32 lo, F32 grad, const Decoded& decoded,
                           Updated& updated, Inside inside) const {
    const int vector = i / kLanes + j;
    V p = from_bits((bits_of(hi) | (shifted<8 - 8 * j>(lo) & 0xFF00u)) - 0x8000u);
    V old[kStates + 1], state[kStates + 1];
    decode_all<0, j>(decoded, old);
    for (int k = 0; k < kStates; ++k) state[k] = old[k];
    T::update(factors_, p, V(grad * grad_scale_), state);
    const U32 random = noise_.every_second(at + i + first_of(j));
    updated.random[vector] = random;
    for (int k = 0; k < kStates; ++k) {
      const V x = inside.only_inside(i + first_of(j), state[k], old[k]);
      updated.states[vector][k] = x;
      updated.largest[k] = larger(updated.largest[k], bits_of(x.x) & 0x7FFFFFFFu);
    }
    return add_to_bits(p.x, random >> 24);
  }

  template <int k, int j>
  static void decode_all(const Decoded& from, V* state) {
    if constexpr (k < kStates) {
      state[k] = CodeOf<k>::template decode<j>(from.codes[k], from.half_scale[k], from.scale[k]);
      decode_all<k + 1, j>(from, state);
    }
  }

  template <int k>
  static void encode_all(const Updated& updated, const List<uint8_t*, kStates>& codes,
                         const List<uint8_t*, kStates>& scales) {
    if constexpr (k < kStates) {
      const uint32_t exponent = CodeOf<k>::exponent(largest_lane(updated.largest[k]));
      *scales[k] = static_cast<uint8_t>(exponent);
      if (exponent == 255) {
        __builtin_memset(codes[k], 0, kScaleBlock);
      } else {
        encode_state<k>(updated, from_bits(broadcast((254u - exponent) << 23)), codes[k]);
      }
      encode_all<k + 1>(updated, codes, scales);
    }
  }

  template <int k>
  static void encode_state(const Updated& updated, F32 inverse_scale, uint8_t* codes) {
#pragma GCC unroll 4
    for (int q = 0; q < kQuads; ++q) {
      const auto code = [&](int j) {
        const U32 random = updated.random[4 * q + j];
        return CodeOf<k>::encode(updated.states[4 * q + j][k].x, inverse_scale,
                                 k == 0 ? random << 7 : random >> 5);
      };
      constexpr int kCut = CodeOf<k>::kCut;
      store_quad(codes + q * 4 * kLanes, shifted<-kCut>(code(0)), shifted<8 - kCut>(code(1)),
                 shifted<16 - kCut>(code(2)), shifted<24 - kCut>(code(3)));
    }
  }

  void cut_block(int64_t at, const List<uint8_t*, kStates>& codes,
                 const List<uint8_t*, kStates>& scales) const {
    const int64_t begin = at < pass_.begin ? pass_.begin - at : 0;
    const int64_t end = (at + kScaleBlock < pass_.end ? at + kScaleBlock : pass_.end) - at;
    const int64_t count = at + kScaleBlock < pass_.elements ? kScaleBlock : pass_.elements - at;
    uint16_t hi[kScaleBlock] = {};
    int8_t lo[kScaleBlock] = {};
    Grad grad[kScaleBlock] = {};
    uint8_t copies[kStates + 1][kScaleBlock] = {};
    List<uint8_t*, kStates> copied;
    copy(hi + begin, hi_ + at + begin, end - begin);
    copy(lo + begin, lo_ + at + begin, end - begin);
    copy(grad + begin, grad_ + at + begin, end - begin);
    for (int k = 0; k < kStates; ++k) {
      copy(copies[k], codes[k], count);
      copied[k] = copies[k];
    }
    whole_block(at, hi, lo, grad, copied, scales,
                SomeInside{static_cast<uint32_t>(begin), static_cast<uint32_t>(end)});
    copy(hi_ + at + begin, hi + begin, end - begin);
    copy(lo_ + at + begin, lo + begin, end - begin);
    for (int k = 0; k < kStates; ++k) copy(codes[k], copies[k], count);
  }

  template <class E>
  static void copy(E* to, const E* from, int64_t n) {
    __builtin_memcpy(to, from, static_cast<size_t>(n) * sizeof(E));
  }

  const Pass& pass_;
  const typename T::Factors factors_;
  const NoiseVector noise_;
  const Grad* grad_;
  float grad_scale_;
  uint16_t* hi_;
  int8_t* lo_;
  List<uint8_t*, kStates> codes_;
};

template <class T, class Grad>
void update_blocks(const Pass& pass) {
  BlockUpdate<T, Grad>(pass).run();
}

template <class T, Format kFormat, class Grad>
constexpr UpdateKernel kernel_of() {
  constexpr int kStates = T::kStateCount;
  switch (kFormat) {
    case Format::fp32:
      return update_streams<T, Fp32Weights, Fp32States<kStates>, Grad, LineAhead>;
    case Format::exact:
      return update_streams<T, SplitWeights, Fp32States<kStates>, Grad, BurstAhead>;
    case Format::fp16:
      return update_streams<T, Fp16Weights, Fp32States<kStates>, Grad, BurstAhead>;
    case Format::compact:
      return update_pairs<T, SplitWeights, Bf16States<kStates>, Grad>;
    case Format::eight_bit:
      return update_blocks<T, Grad>;
  }
}

template <class T, int kFormat = 0>
constexpr void fill_row(UpdateKernel (&row)[kFormatCount][kElementCount]) {
  if constexpr (kFormat < kFormatCount) {
    constexpr Format format{kFormat};
    row[kFormat][static_cast<int>(Element::bf16)] = kernel_of<T, format, uint16_t>();
    row[kFormat][static_cast<int>(Element::fp16)] = kernel_of<T, format, Fp16>();
    row[kFormat][static_cast<int>(Element::fp32)] = kernel_of<T, format, float>();
    fill_row<T, kFormat + 1>(row);
  }
}
