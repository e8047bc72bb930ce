// What happens to gradients before the update (gradient.h). Part of kernels.inl.

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
Squares squares(const T* x, int64_t n) {
  double sum = 0;
  U32 not_finite{};
  for (int64_t at = 0; at < n; at += kBlock) {
    sum += block_squares(x + at, n - at < kBlock ? n - at : kBlock, not_finite);
  }
  uint32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= not_finite[lane];
  return Squares{sum, any == 0};
}

template <class From, class To>
void convert(const From* from, To* to, int64_t n) {
  for_each_vector(0, n,
                  [=](int64_t i, auto part) { store_values(to + i, load_values(from + i, part), part); });
}

template <class From, class To>
void add_to(const From* from, To* to, int64_t n) {
  for_each_vector(0, n, [=](int64_t i, auto part) {
    store_values(to + i, load_values(to + i, part) + load_values(from + i, part), part);
  });
}

void scale(float* to, float factor, int64_t n) {
  for_each_vector(0, n, [=](int64_t i, auto part) { store(to + i, load(to + i, part) * factor, part); });
}
