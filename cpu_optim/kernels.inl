// The math, written once. Included once per instruction set, inside its namespace, after the vector type
// (vector.inl) and the form's own fma, sqrt, conversions and masked access. A tail is the same body with its
// last lanes masked.

template <class Body>
inline void for_each_vector(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, All{});
  if (i < n) body(i, First{n - i});
}

// Values as fp32, whatever they are stored as.

template <class Part>
inline F32 load_values(const float* from, Part part) {
  return load(from, part);
}
template <class Part>
inline F32 load_values(const uint16_t* from, Part part) {
  return from_bits(extend(load(from, part)) << 16);
}
template <class Part>
inline void store_values(float* to, F32 x, Part part) {
  store(to, x, part);
}
// To bf16, nearest even: adding 0x7FFF carries into the upper half above the middle, and on it where the
// upper half is odd. The sum would carry a NaN over into a number, so NaN becomes the quiet 0x7FC0, as in
// torch.
template <class Part>
inline void store_values(uint16_t* to, F32 x, Part part) {
  const U32 bits = bits_of(x);
  const U32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const U32 nan = reinterpret_cast<U32>((bits & 0x7FFFFFFFu) > 0x7F800000u);
  store(to, lower_halves((rounded & ~nan) | (nan & 0x7FC0u)), part);
}

// Square root and division fill the processor's window before the next lines are asked for, so they are asked
// for ahead. Measured on a Zen 4 core: 512 elements ahead lifted the split update from 22 to 27 GB/s and
// more; 256 helped less. Past an array's end it is harmless.
constexpr int64_t kAhead = 512;
template <class T>
inline void prefetch(const T* array, int64_t i) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(array) +
                                                   static_cast<uintptr_t>(i) * sizeof(T)));
}

// Weights: the two halves of split.h, or fp32.

struct SplitWeights {
  uint16_t* hi;
  int16_t* lo;

  void prefetch_at(int64_t i) const {
    prefetch(hi, i);
    prefetch(lo, i);
  }
  template <class Part>
  F32 load_at(int64_t i, Part part) const {
    return from_bits((extend(load(hi + i, part)) << 16) + extend(load(lo + i, part)));
  }
  template <class Part>
  void store_at(int64_t i, F32 p, Part part) const {
    const U32 upper = (bits_of(p) + 0x8000u) >> 16;
    store(hi + i, lower_halves(upper), part);
    store(lo + i, reinterpret_cast<I16>(lower_halves(bits_of(p) - (upper << 16))), part);
  }
};

struct Fp32Weights {
  float* p;

  void prefetch_at(int64_t i) const { prefetch(p, i); }
  template <class Part>
  F32 load_at(int64_t i, Part part) const {
    return load(p + i, part);
  }
  template <class Part>
  void store_at(int64_t i, F32 x, Part part) const {
    store(p + i, x, part);
  }
};

// The formulas of adam.h, in their order.
template <class Weights, class Grad>
inline void adam(Weights weights, float* m_all, float* v_all, const Grad* grad, int64_t n,
                 const AdamFactors& f) {
  const F32 one_minus_beta1 = broadcast(f.one_minus_beta1), one_minus_beta2 = broadcast(f.one_minus_beta2);
  const F32 inverse_sqrt_bias2 = broadcast(f.inverse_sqrt_bias2), eps = broadcast(f.eps);
  const F32 minus_step_size = broadcast(-f.step_size), l2 = broadcast(f.l2);
  const bool has_l2 = f.l2 != 0;
  const float grad_scale = f.grad_scale, beta2 = f.beta2, decay = f.decay;
  for_each_vector(n, [=](int64_t i, auto part) {
    weights.prefetch_at(i + kAhead);
    prefetch(m_all, i + kAhead);
    prefetch(v_all, i + kAhead);
    prefetch(grad, i + kAhead);
    F32 p = weights.load_at(i, part);
    F32 m = load(m_all + i, part);
    F32 v = load(v_all + i, part);
    F32 g = load_values(grad + i, part) * grad_scale;
    if (has_l2) g = fma(l2, p, g);
    p = p * decay;
    m = fma(one_minus_beta1, g - m, m);
    v = fma(one_minus_beta2, g * g, v * beta2);
    p = fma(minus_step_size, m / fma(sqrt(v), inverse_sqrt_bias2, eps), p);
    weights.store_at(i, p, part);
    store(m_all + i, m, part);
    store(v_all + i, v, part);
  });
}

void adam_split_bf16(uint16_t* hi, int16_t* lo, float* m, float* v, const uint16_t* grad, int64_t n,
                     const AdamFactors& factors) {
  adam(SplitWeights{hi, lo}, m, v, grad, n, factors);
}
void adam_split_fp32(uint16_t* hi, int16_t* lo, float* m, float* v, const float* grad, int64_t n,
                     const AdamFactors& factors) {
  adam(SplitWeights{hi, lo}, m, v, grad, n, factors);
}
void adam_fp32(float* p, float* m, float* v, const float* grad, int64_t n, const AdamFactors& factors) {
  adam(Fp32Weights{p}, m, v, grad, n, factors);
}

// The tree of gradient.h: blocks of 4096 elements, 32 lanes in a block.

constexpr int64_t kBlock = 4096;
constexpr int kTreeLanes = 32;
constexpr int kTreeVectors = kTreeLanes / kLanes;

struct TreeBlock {
  F64 sums[2 * kTreeVectors];
  U32 not_finite;

  // The square of a float is exact in double, so fused or not is the same.
  void add(int vector, F32 x) {
    const U32 bad = reinterpret_cast<U32>((bits_of(x) & 0x7F800000u) == 0x7F800000u);
    not_finite |= bad;
    const F32 good = from_bits(bits_of(x) & ~bad);
    sums[2 * vector] += low(good) * low(good);
    sums[2 * vector + 1] += high(good) * high(good);
  }

  double fold() const {
    double lanes[kTreeLanes];
    __builtin_memcpy(lanes, sums, sizeof(lanes));
    for (int width = kTreeLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    return lanes[0];
  }
};

template <class T>
inline double block_squares(const T* x, int64_t n, U32& not_finite) {
  TreeBlock block{{}, not_finite};
  int64_t i = 0;
  for (; i + kTreeLanes <= n; i += kTreeLanes) {
#pragma GCC unroll 8
    for (int vector = 0; vector < kTreeVectors; ++vector) {
      block.add(vector, load_values(x + i + vector * kLanes, All{}));
    }
  }
  for (int vector = 0; i < n; i += kLanes, ++vector) {  // lanes that do not exist add +0
    block.add(vector, load_values(x + i, First{n - i < kLanes ? n - i : kLanes}));
  }
  not_finite = block.not_finite;
  return block.fold();
}

template <class T>
inline Squares tree_squares(const T* x, int64_t n) {
  double sum = 0;
  U32 not_finite{};
  for (int64_t at = 0; at < n; at += kBlock) {
    sum += block_squares(x + at, n - at < kBlock ? n - at : kBlock, not_finite);
  }
  uint32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= not_finite[lane];
  return Squares{sum, any == 0};
}

Squares squares_bf16(const uint16_t* x, int64_t n) {
  return tree_squares(x, n);
}
Squares squares_fp32(const float* x, int64_t n) {
  return tree_squares(x, n);
}

template <class From, class To>
inline void convert(const From* from, To* to, int64_t n) {
  for_each_vector(n, [=](int64_t i, auto part) { store_values(to + i, load_values(from + i, part), part); });
}

template <class From, class To>
inline void add_to(const From* from, To* to, int64_t n) {
  for_each_vector(n, [=](int64_t i, auto part) {
    store_values(to + i, load_values(to + i, part) + load_values(from + i, part), part);
  });
}

void widen(const uint16_t* from, float* to, int64_t n) {
  convert(from, to, n);
}
void narrow(const float* from, uint16_t* to, int64_t n) {
  convert(from, to, n);
}
void accumulate_bf16_bf16(const uint16_t* from, uint16_t* to, int64_t n) {
  add_to(from, to, n);
}
void accumulate_bf16_fp32(const uint16_t* from, float* to, int64_t n) {
  add_to(from, to, n);
}
void accumulate_fp32_fp32(const float* from, float* to, int64_t n) {
  add_to(from, to, n);
}
void scale(float* to, float factor, int64_t n) {
  for_each_vector(n, [=](int64_t i, auto part) { store(to + i, load(to + i, part) * factor, part); });
}

constexpr Kernels kTable{.name = kName,
                         .adam_split_bf16 = adam_split_bf16,
                         .adam_split_fp32 = adam_split_fp32,
                         .adam_fp32 = adam_fp32,
                         .squares_bf16 = squares_bf16,
                         .squares_fp32 = squares_fp32,
                         .widen = widen,
                         .narrow = narrow,
                         .accumulate_bf16_bf16 = accumulate_bf16_bf16,
                         .accumulate_bf16_fp32 = accumulate_bf16_fp32,
                         .accumulate_fp32_fp32 = accumulate_fp32_fp32,
                         .scale = scale};
