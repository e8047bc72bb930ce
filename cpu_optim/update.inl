// The fused pass. Part of kernels.inl.

template <class T, class Weights, class States, class Grad>
inline void update_elements(const Pass& pass) {
  const typename T::Factors factors = *static_cast<const typename T::Factors*>(pass.factors);
  const Weights weights(pass);
  const States states(pass, Weights::kComponents);
  const Grad* grad = static_cast<const Grad*>(pass.gradient);
  const float grad_scale = pass.grad_scale;
  for_each_vector(pass.begin, pass.end, [=](int64_t i, auto part) {
    weights.prefetch_at(i + kAhead);
    states.prefetch_at(i + kAhead);
    prefetch(grad, i + kAhead);
    V p = weights.load_at(i, part);
    V state[T::kStateCount + 1];
    states.load_at(i, state, part);
    T::update(factors, p, V(load_values(grad + i, part) * grad_scale), state);
    weights.store_at(i, p.x, part);
    states.store_at(i, state, part);
  });
}

// Format::eight_bit, a block of kScaleBlock elements at a time: states are decoded, updated and kept until
// the largest of them is known, then coded. Blocks that are cut (by the range, or by the end of the piece) go
// through a copy of full length, so the body knows whole blocks only.
template <class T, class Grad>
class BlockUpdate {
  static constexpr int kStates = T::kStateCount;
  static constexpr int kVectors = static_cast<int>(kScaleBlock) / kLanes;

 public:
  explicit BlockUpdate(const Pass& pass)
      : pass_(pass),
        factors_(*static_cast<const typename T::Factors*>(pass.factors)),
        noise_(block_noise(pass.noise)),
        grad_(static_cast<const Grad*>(pass.gradient)),
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
        prefetch_at(at + kAhead);
        prefetch_at(at + kAhead + kScaleBlock / 2);
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
    V only_inside(int vector, V updated, V old) const {
      const U32 lane = AllLanes::kNumbers + static_cast<uint32_t>(vector * kLanes);
      const U32 inside = mask_of(lane >= begin) & mask_of(lane < end);
      return from_bits(choose(inside, bits_of(updated.x), bits_of(old.x)));
    }
  };

  void prefetch_at(int64_t i) const {
    prefetch(hi_, i);
    prefetch(grad_, i);
    prefetch(lo_, i);
    for (int k = 0; k < kStates; ++k) prefetch(codes_[k], i);
  }

  template <int k>
  static constexpr Values kValues = T::kStates[k].values;

  template <class Inside>
  inline void whole_block(int64_t at, uint16_t* hi, int8_t* lo, const Grad* grad,
                          const List<uint8_t*, kStates>& codes, const List<uint8_t*, kStates>& scales,
                          Inside inside) const {
    List<F32, kStates> scale;
    for (int k = 0; k < kStates; ++k) scale[k] = from_bits(broadcast(uint32_t{*scales[k]} << 23));
    List<List<V, kStates>, kVectors> states;
    List<U32, kVectors> random;
    List<U32, kStates> largest{};
#pragma GCC unroll 16
    for (int j = 0; j < kVectors; ++j) {
      const int i = j * kLanes;
      V p = from_bits((extend(load(hi + i, All{})) << 16) + (extend(load(lo + i, All{})) << 8));
      V old[kStates + 1], state[kStates + 1];
      decode_all<0>(codes, i, scale, old);
      for (int k = 0; k < kStates; ++k) state[k] = old[k];
      T::update(factors_, p, V(load_values(grad + i, All{}) * pass_.grad_scale), state);
      random[j] = noise_.at(at + i);
      store_weight(hi + i, lo + i, p.x, random[j] >> 24);
      for (int k = 0; k < kStates; ++k) {
        states[j][k] = inside.only_inside(j, state[k], old[k]);
        largest[k] = larger(largest[k], bits_of(states[j][k].x) & 0x7FFFFFFFu);
      }
    }
    encode_all<0>(states, random, largest, codes, scales);
  }

  // To 24 bits, stochastically, then split as in split.h, the lower byte of lo left out.
  static void store_weight(uint16_t* hi, int8_t* lo, F32 p, U32 random) {
    const U32 kept = add_to_bits(p, random);  // but for its lower byte
    store(hi, lower_halves((kept + 0x8000u) >> 16), All{});
    store(lo, reinterpret_cast<I8>(lower_bytes(kept >> 8)), All{});
  }

  template <int k>
  static void decode_all(const List<uint8_t*, kStates>& codes, int i, const List<F32, kStates>& scale,
                         V* state) {
    if constexpr (k < kStates) {
      state[k] = Code<kValues<k>>::decode(extend(load(codes[k] + i, All{})), scale[k]);
      decode_all<k + 1>(codes, i, scale, state);
    }
  }

  template <int k>
  void encode_all(const List<List<V, kStates>, kVectors>& states, const List<U32, kVectors>& random,
                  const List<U32, kStates>& largest, const List<uint8_t*, kStates>& codes,
                  const List<uint8_t*, kStates>& scales) const {
    if constexpr (k < kStates) {
      using C = Code<kValues<k>>;
      const U32 exponent = C::exponent(largest_lane(largest[k]));
      const U32 keep = mask_of(exponent != 255u);
      const F32 inverse_scale = from_bits(((254u - exponent) << 23) & keep);
      *scales[k] = static_cast<uint8_t>(exponent[0]);
#pragma GCC unroll 16
      for (int j = 0; j < kVectors; ++j) {
        const U32 drawn = k == 0 ? random[j] << 7 : random[j] >> 5;
        const U32 noise = (drawn & 0x7FF80u) | 0x40u;  // 12 bits, in the middle of their 2^7
        store(codes[k] + j * kLanes, lower_bytes(C::encode(states[j][k].x, inverse_scale, keep, noise)),
              All{});
      }
      encode_all<k + 1>(states, random, largest, codes, scales);
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
      return update_elements<T, Fp32Weights, Fp32States<kStates>, Grad>;
    case Format::exact:
      return update_elements<T, SplitWeights, Fp32States<kStates>, Grad>;
    case Format::fp16:
      return update_elements<T, Fp16Weights, Fp32States<kStates>, Grad>;
    case Format::compact:
      return update_elements<T, SplitWeights, Bf16States<kStates>, Grad>;
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
