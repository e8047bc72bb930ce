// Functions of single values, over vectors. See forms.inl.

// A vector of `n` elements in whole registers; the last one goes through memory of its own, so that nothing
// outside the vector is touched.

template <class Body>
inline void for_each_register(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}
template <class T>
inline auto load_some(const T* from, int count) {
  if (count == kLanes) return load(from, All{});
  T values[kLanes] = {};
  __builtin_memcpy(values, from, static_cast<size_t>(count) * sizeof(T));
  return load(values, All{});
}
template <class T>
inline void store_some(T* to, typename VectorOf<T>::type x, int count) {
  if (count == kLanes) return store(to, x, All{});
  T values[kLanes];
  store(values, x, All{});
  __builtin_memcpy(to, values, static_cast<size_t>(count) * sizeof(T));
}

inline F32 widen_lanes(U16 x) {
  return from_bits(extend(x) << 16);
}
inline U16 narrow_lanes(F32 x) {
  const U32 bits = bits_of(x);
  const U32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const U32 nan = mask_of((bits & 0x7FFFFFFFu) > 0x7F800000u);
  return lower_halves((rounded & ~nan) | (nan & 0x7FC0u));
}
inline F32 load_values(const float* from) {
  return load(from, All{});
}
inline F32 load_values(const uint16_t* from) {
  return widen_lanes(load(from, All{}));
}
inline F32 load_values(const int8_t* from) {
  return __builtin_convertvector(load_integers(from), F32);
}

inline F32 select(U32 mask, F32 yes, F32 no) {
  return from_bits((mask & bits_of(yes)) | (~mask & bits_of(no)));
}
inline F32 at_most(F32 x, F32 limit) {
  return select(mask_of(x > limit), limit, x);  // a NaN stays
}
inline F32 at_least(F32 x, F32 limit) {
  return select(mask_of(x < limit), limit, x);
}

// In one order: lanes that lie half a register apart, then a quarter, and so on.
inline float sum_of_lanes(F32 x) {
  float lanes[kLanes];
  store(lanes, x, All{});
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    for (int i = 0; i < distance; ++i) lanes[i] += lanes[i + distance];
  }
  return lanes[0];
}

/// exp to about two units in the last place. x = n ln 2 + r with |r| <= ln 2 / 2; 2^n goes into the exponent,
/// exp(r) by a polynomial (Cephes, expf). Below -87 the result is 0, above 88 that of 88; a NaN stays.
inline F32 exp_lanes(F32 x) {
  const U32 tiny = mask_of(x < broadcast(-87.0f));
  const F32 within = at_most(at_least(x, broadcast(-87.0f)), broadcast(88.0f));
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const F32 magic = broadcast(12582912.0f);
  const F32 shifted = fma(within, broadcast(1.44269504088896341f), magic);
  const F32 n = shifted - magic;
  F32 r = fma(n, broadcast(-0.693359375f), within);
  r = fma(n, broadcast(2.12194440e-4f), r);
  F32 y = broadcast(1.9875691500e-4f);
  y = fma(y, r, broadcast(1.3981999507e-3f));
  y = fma(y, r, broadcast(8.3334519073e-3f));
  y = fma(y, r, broadcast(4.1665795894e-2f));
  y = fma(y, r, broadcast(1.6666665459e-1f));
  y = fma(y, r, broadcast(5.0000001201e-1f));
  y = fma(y, r * r, r + broadcast(1.0f));
  const F32 scaled = from_bits(bits_of(y) + (bits_of(shifted) << 23));
  return select(tiny, F32{}, scaled);
}
inline F32 sigmoid(F32 x) {
  return broadcast(1.0f) / (broadcast(1.0f) + exp_lanes(F32{} - x));
}
inline F32 tanh_lanes(F32 x) {
  return broadcast(1.0f) - broadcast(2.0f) / (broadcast(1.0f) + exp_lanes(x + x));
}

float sum_of_squares(const float* x, int64_t n) {
  F32 total{};
  for_each_register(n, [&](int64_t i, int count) {
    const F32 some = load_some(x + i, count);
    total = fma(some, some, total);
  });
  return sum_of_lanes(total);
}

float sum(const float* x, int64_t n) {
  F32 total{};
  for_each_register(n, [&](int64_t i, int count) { total = total + load_some(x + i, count); });
  return sum_of_lanes(total);
}

float log_sum_exp(const float* x, int64_t n) {
  float largest = x[0];
  for (int64_t i = 1; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  // Several sums, because a long one loses what is small beside it.
  constexpr int64_t kRun = 4096;
  double total = 0;
  for (int64_t run = 0; run < n; run += kRun) {
    F32 sums{};
    for_each_register(n - run < kRun ? n - run : kRun, [&](int64_t i, int count) {
      F32 y = exp_lanes(load_some(x + run + i, count) - broadcast(largest));
      if (count < kLanes) {
        float lanes[kLanes] = {};
        store_some(lanes, y, count);
        y = load(lanes, All{});
      }
      sums = sums + y;
    });
    total += sum_of_lanes(sums);
  }
  return largest + static_cast<float>(__builtin_log(total));
}

void normalise(const float* x, float mean, float factor, const float* weight, float offset, const float* bias,
               float* to, int64_t n) {
  for_each_register(n, [&](int64_t i, int count) {
    const F32 centred = (load_some(x + i, count) - broadcast(mean)) * broadcast(factor);
    F32 y = centred * (load_some(weight + i, count) + broadcast(offset));
    if (bias != nullptr) y = y + load_some(bias + i, count);
    store_some(to + i, y, count);
  });
}

template <class Function>
inline void activate(float* x, const float* up, int64_t n, Function function) {
  for_each_register(n, [&](int64_t i, int count) {
    F32 y = function(load_some(x + i, count));
    if (up != nullptr) y = y * load_some(up + i, count);
    store_some(x + i, y, count);
  });
}

void silu(float* x, const float* up, int64_t n) {
  activate(x, up, n, [](F32 v) { return v * sigmoid(v); });
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016).
void gelu_tanh(float* x, const float* up, int64_t n) {
  activate(x, up, n, [](F32 v) {
    const F32 u = broadcast(1.5957691216f) * fma(broadcast(0.044715f) * v * v, v, v);
    return v * sigmoid(u);
  });
}

void add(const float* x, float* to, int64_t n) {
  for_each_register(n, [&](int64_t i, int count) {
    store_some(to + i, load_some(to + i, count) + load_some(x + i, count), count);
  });
}

void narrow(const float* x, uint16_t* to, int64_t n) {
  for_each_register(
      n, [&](int64_t i, int count) { store_some(to + i, narrow_lanes(load_some(x + i, count)), count); });
}

void widen(const uint16_t* x, float* to, int64_t n) {
  for_each_register(
      n, [&](int64_t i, int count) { store_some(to + i, widen_lanes(load_some(x + i, count)), count); });
}

/// The same in every form: no sum, and each product is rounded before 1.5 * 2^23 is added, which rounds it to an
/// integer in the low bits.
float quantise(const float* x, int8_t* to, int64_t n) {
  uint32_t largest = 0;  // of the magnitudes' bits, among which a NaN's are the largest
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, x + i, sizeof(bits));
    bits &= 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  float scale;
  __builtin_memcpy(&scale, &largest, sizeof(scale));
  scale /= 127;
  if (scale < __FLT_MIN__) scale = 0;
  const float factor = scale == 0 ? 0 : 1 / scale;
  for (int64_t i = 0; i < n; ++i) {
    const float shifted = x[i] * factor + 12582912.0f;
    uint32_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof(bits));
    to[i] = static_cast<int8_t>(bits & 0xFFu);
  }
  return scale;
}

/// A lane's place is its position modulo kKeyBlock, so that the sum's order does not depend on where the rows
/// that are computed together begin or end.
void softmax(float* x, int64_t begin, int64_t first, int64_t last, int64_t end, float scale, float softcap) {
  constexpr float kNone = -__builtin_inff();
  for (int64_t i = begin; i < first; ++i) x[i] = kNone;
  for (int64_t i = last; i < end; ++i) x[i] = kNone;
  F32 largest = broadcast(kNone);
  for (int64_t i = begin; i < end; i += kLanes) largest = at_least(load(x + i, All{}), largest);
  float lanes[kLanes];
  store(lanes, largest, All{});
  for (int i = 1; i < kLanes; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];

  const auto capped = [&](F32 v) {
    return softcap > 0 ? broadcast(softcap) * tanh_lanes(v * broadcast(scale / softcap)) : v * broadcast(scale);
  };
  const F32 top = capped(broadcast(lanes[0]));
  F32 totals[kKeyBlock / kLanes] = {};
  for (int64_t i = begin; i < end; i += kLanes) {
    const F32 v = load(x + i, All{});
    const F32 weight = select(mask_of(v == broadcast(kNone)), F32{}, exp_lanes(capped(v) - top));
    F32& total = totals[(i - begin) % kKeyBlock / kLanes];
    total = total + weight;
    store(x + i, weight, All{});
  }
  float total = 0;
  for (const F32 part : totals) total += sum_of_lanes(part);
  for (int64_t i = begin; i < end; i += kLanes) store(x + i, load(x + i, All{}) * broadcast(1 / total), All{});
}
