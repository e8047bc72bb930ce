// How weights and states lie in memory, as vectors. Part of kernels.inl.

// An array that is all of this file's own: std::array's functions could be shared between instruction sets.
template <class T, int kSize>
struct List {
  T at[kSize];
  T& operator[](int i) { return at[i]; }
  const T& operator[](int i) const { return at[i]; }
};
template <class T>
struct List<T, 0> {
  T& operator[](int) const { __builtin_unreachable(); }
};

// Square root and division fill the processor's window before the next lines are asked for, so they are asked
// for ahead, in every stream: of kElements elements at a time, kBytes ahead. Past an array's end it is
// harmless.
template <int kElements_, uintptr_t kBytes, Cache kCache>
struct Ahead {
  static constexpr int kElements = kElements_;

  // Always inline: g++ takes a function that only prefetches for one without effect.
  template <class T>
  __attribute__((always_inline)) static void ask(const T* array, int64_t i) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(array) + static_cast<uintptr_t>(i) * sizeof(T) + kBytes;
#pragma GCC unroll 8
    for (uintptr_t byte = 0; byte < kElements * sizeof(T); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const void*>(at + byte), 0, static_cast<int>(kCache));
    }
  }
};

template <class T>
inline T* component(const Pass& pass, int i) {
  return reinterpret_cast<T*>(pass.components[i]);
}

// Random bits of pass.h, a vector of elements at a time, moved on by the step's `word`.
class NoiseVector {
 public:
  NoiseVector(const Noise& noise_, uint32_t word_) : noise(noise_), word(word_) {}

  U32 at(int64_t i) const { return of(AllLanes::kNumbers + (noise.index + static_cast<uint32_t>(i))); }
  // Of every second element from i on.
  U32 every_second(int64_t i) const {
    return of(AllLanes::kNumbers * 2u + (noise.index + static_cast<uint32_t>(i)));
  }

 private:
  U32 of(U32 k) const {
    U32 x = k ^ noise.key0;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x += noise.key1;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x + word;
  }

  Noise noise;
  uint32_t word;
};
// The bits of x, which comes out of arithmetic, and `random` added below the last that is kept. A NaN must
// not be carried over into a number; it is quiet, so it is one still when its lower bits are cut off.
inline U32 add_to_bits(F32 x, U32 random) {
  return x == x ? bits_of(x) + random : bits_of(x);
}
// Two fields of 16 bits.
inline NoiseVector halves_noise(const Noise& noise) {
  return {noise, (noise.weyl >> 16) * 0x10001u};
}
// From below: two of 12 bits, one of 8.
inline NoiseVector block_noise(const Noise& noise) {
  return {noise, (noise.weyl >> 20) * 0x1001u + (noise.weyl >> 24 << 24)};
}

// ---- weights

struct Fp32Weights {
  static constexpr int kComponents = 1;
  float* p;

  explicit Fp32Weights(const Pass& pass) : p(component<float>(pass, 0)) {}
  template <class Where>
  void ask_at(int64_t i) const {
    Where::ask(p, i);
  }
  template <class Part>
  F32 load_at(int64_t i, Part part) const {
    return load(p + i, part);
  }
  template <class Part>
  void store_at(int64_t i, F32 x, Part part) const {
    store(p + i, x, part);
  }
};

// The two halves of split.h.
struct SplitWeights {
  static constexpr int kComponents = 2;
  uint16_t* hi;
  int16_t* lo;

  explicit SplitWeights(const Pass& pass)
      : hi(component<uint16_t>(pass, 0)), lo(component<int16_t>(pass, 1)) {}
  template <class Where>
  void ask_at(int64_t i) const {
    Where::ask(hi, i);
    Where::ask(lo, i);
  }
  template <class Part>
  F32 load_at(int64_t i, Part part) const {
    return from_bits((extend(load(hi + i, part)) << 16) + extend(load(lo + i, part)));
  }
  template <class Part>
  void store_at(int64_t i, F32 p, Part part) const {
    store(hi + i, lower_halves((bits_of(p) + 0x8000u) >> 16), part);
    store(lo + i, reinterpret_cast<I16>(lower_halves(bits_of(p))), part);  // what hi << 16 leaves alone
  }

  // lo with its sign turned is what is to be added to (hi << 16) - 0x8000, and has no sign.
  Pair load_pair_at(int64_t i) const {
    const Pair upper = load_pair(hi + i);
    const U32 lower = load_lanes(lo + i) ^ 0x80008000u;
    return {from_bits((bits_of(upper.even) | (lower & 0xFFFFu)) - 0x8000u),
            from_bits((bits_of(upper.odd) | (lower >> 16)) - 0x8000u)};
  }
  void store_pair_at(int64_t i, Pair p) const {
    const U32 even = bits_of(p.even), odd = bits_of(p.odd);
    store_lanes(hi + i, upper_halves(even + 0x8000u, odd + 0x8000u));
    store_lanes(lo + i, choose(broadcast(0xFFFFu), even, odd << 16));
  }
};

// fp16 for forward, written only, beside the fp32 master.
struct Fp16Weights {
  static constexpr int kComponents = 2;
  Fp16* p16;
  float* master;

  explicit Fp16Weights(const Pass& pass) : p16(component<Fp16>(pass, 0)), master(component<float>(pass, 1)) {}
  template <class Where>
  void ask_at(int64_t i) const {
    Where::ask(p16, i);
    Where::ask(master, i);
  }
  template <class Part>
  F32 load_at(int64_t i, Part part) const {
    return load(master + i, part);
  }
  template <class Part>
  void store_at(int64_t i, F32 x, Part part) const {
    store_values(p16 + i, x, part);
    store(master + i, x, part);
  }
};

// ---- states

template <int kCount>
struct Fp32States {
  List<float*, kCount> state;

  Fp32States(const Pass& pass, int first) {
    for (int k = 0; k < kCount; ++k) state[k] = component<float>(pass, first + k);
  }
  template <class Where>
  void ask_at(int64_t i) const {
    for (int k = 0; k < kCount; ++k) Where::ask(state[k], i);
  }
  template <class Part>
  void load_at(int64_t i, V* values, Part part) const {
    for (int k = 0; k < kCount; ++k) values[k] = load(state[k] + i, part);
  }
  template <class Part>
  void store_at(int64_t i, const V* values, Part part) const {
    for (int k = 0; k < kCount; ++k) store(state[k] + i, values[k].x, part);
  }
};

// bf16 with stochastic rounding: 16 random bits are added below the last that is kept, the rest is cut off.
// So the expected value is the exact one. Infinity has nothing to carry.
template <int kCount>
struct Bf16States {
  List<uint16_t*, kCount> state;
  NoiseVector noise;

  Bf16States(const Pass& pass, int first) : noise(halves_noise(pass.noise)) {
    for (int k = 0; k < kCount; ++k) state[k] = component<uint16_t>(pass, first + k);
  }
  template <class Part>
  void load_at(int64_t i, V* values, Part part) const {
    for (int k = 0; k < kCount; ++k) values[k] = load_values(state[k] + i, part);
  }
  template <class Part>
  void store_at(int64_t i, const V* values, Part part) const {
    if constexpr (kCount > 0) {
      static_assert(kCount <= 2, "a draw has 32 bits");
      const U32 random = noise.at(i);
      for (int k = 0; k < kCount; ++k) {
        const U32 sum = add_to_bits(values[k].x, k == 0 ? random & 0xFFFFu : random >> 16);
        store(state[k] + i, lower_halves(sum >> 16), part);
      }
    }
  }

  template <class Where>
  void ask_at(int64_t i) const {
    for (int k = 0; k < kCount; ++k) Where::ask(state[k], i);
  }
  void load_pair_at(int64_t i, V* even, V* odd) const {
    for (int k = 0; k < kCount; ++k) {
      const Pair pair = load_pair(state[k] + i);
      even[k] = pair.even, odd[k] = pair.odd;
    }
  }
  void store_pair_at(int64_t i, const V* even, const V* odd) const {
    if constexpr (kCount > 0) {
      const U32 drawn_even = noise.every_second(i), drawn_odd = noise.every_second(i + 1);
      for (int k = 0; k < kCount; ++k) {
        const auto added = [k](F32 x, U32 drawn) {
          return add_to_bits(x, k == 0 ? drawn & 0xFFFFu : drawn >> 16);
        };
        store_lanes(state[k] + i, upper_halves(added(even[k].x, drawn_even), added(odd[k].x, drawn_odd)));
      }
    }
  }
};

// ---- 8 bits: codes of a block with a scale (docs/update.md)
//
// Companding as in the mu-law of telephony (ITU-T G.711): a code is the leading bits of the float
// w = |x| / scale + 1, which lies in [1, 2^segments), so codes are dense near zero and relative above. Zero
// is code 0. The scale is the smallest power of two that keeps the block's largest value within the codes; it
// is stored as its exponent, biased as in fp32. Exponent 0 is a block never written, all zero; 255 a block
// with inf or NaN, which reads as NaN.

template <Values kValues>
struct Code {
  static constexpr bool kSigned = kValues == Values::any;
  static constexpr uint32_t kSegments = kSigned ? 8 : 16;  // of 16 codes each
  static constexpr uint32_t kTopBits =
      kSigned ? 0x43770000u : 0x4777FF00u;  // 247 and 63487: the largest w - 1
  static constexpr uint32_t kOneBits = 0x3F800000u;
  static constexpr int kCut = 19;  // bits of w that a code leaves out

  // The biased exponent of a block whose largest magnitude has these bits.
  static uint32_t exponent(uint32_t largest) {
    if (largest >= 0x7F800000u) return 255;
    const uint32_t up = (largest + (0x7FFFFFu - (kTopBits & 0x7FFFFFu))) >> 23;
    return up > kSegments ? up - (kSegments - 1) : 1;
  }

  // Of vector j of a quad. The exponent of 2 w is put together from parts of its own, w's would need a sum.
  template <int j>
  static F32 decode(U32 codes, F32 half_scale, F32 scale) {
    constexpr uint32_t kTwoBits = 0x40000000u, kCodeBits = (kSegments * 16 - 1) << kCut;
    const U32 twice = (shifted<kCut - 8 * j>(codes) & kCodeBits) | kTwoBits;
    const U32 magnitude = bits_of(fma(from_bits(twice), half_scale, -scale));  // exact
    if constexpr (!kSigned) return from_bits(magnitude);
    return from_bits(magnitude | (shifted<24 - 8 * j>(codes) & 0x80000000u));
  }

  // The code from bit kCut on, of a block that is finite; of `random` the kCut - 7 bits above the lower 7 are
  // used.
  static U32 encode(F32 x, F32 inverse_scale, U32 random) {
    constexpr uint32_t kDrawn = ((1u << kCut) - 1) & ~0x7Fu, kMiddle = 0x40u;
    static_assert(((kMiddle - kOneBits) & kDrawn) == 0);
    const U32 noise = (random & kDrawn) | (kMiddle - kOneBits);
    const U32 magnitude = bits_of(x) & 0x7FFFFFFFu;
    const U32 code = bits_of(fma(from_bits(magnitude), inverse_scale, broadcast(1.0f))) + noise;
    if constexpr (kSigned) return code | ((bits_of(x) >> (24 - kCut)) & (0x80u << kCut));
    const U32 least = larger(code, broadcast(1u << kCut));
    return magnitude != 0u ? least : code;  // a sum of squares is no zero to divide by
  }
};
