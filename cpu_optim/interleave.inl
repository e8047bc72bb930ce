// Elements of 2 bytes and of 1 as lanes of 32 bits without moving them from lane to lane: a vector is read as
// it lies, and a lane's even and odd halves (its four bytes) belong to vectors of their own. What an update
// computes does not depend on which lane an element is in. Part of kernels.inl.
//
// A Pair is 2 kLanes elements: lane k of its vectors has the elements 2k and 2k + 1. A Quad is two pairs, one
// behind the other. Little-endian, as all our machines are.

struct Pair {
  F32 even, odd;
};

template <class T>
inline U32 load_lanes(const T* from) {
  U32 x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
template <class T>
inline void store_lanes(T* to, U32 x) {
  __builtin_memcpy(to, &x, sizeof(x));
}

// The upper halves of what becomes 2 bytes an element.
inline U32 upper_halves(U32 even, U32 odd) {
  return choose(broadcast(0xFFFF0000u), odd, even >> 16);
}

template <int... kLane>
struct Alternation {
  static Pair apart(F32 first, F32 second) {
    return {__builtin_shufflevector(first, second, (2 * kLane)...),
            __builtin_shufflevector(first, second, (2 * kLane + 1)...)};
  }
};
template <int kCount, int... kLane>
struct AlternationUpTo : AlternationUpTo<kCount - 1, kCount - 1, kLane...> {};
template <int... kLane>
struct AlternationUpTo<0, kLane...> : Alternation<kLane...> {};

// Values as fp32.
inline Pair load_pair(const uint16_t* from) {
  const U32 x = load_lanes(from);
  return {from_bits(x << 16), from_bits(x & 0xFFFF0000u)};
}
template <class T>
inline Pair load_pair(const T* from) {
  return AlternationUpTo<kLanes>::apart(load_values(from, All{}), load_values(from + kLanes, All{}));
}

// x shifted left, or right where kBits is negative.
template <int kBits>
inline U32 shifted(U32 x) {
  if constexpr (kBits == 0) {
    return x;
  } else if constexpr (kBits > 0) {
    return x << kBits;
  } else {
    return x >> -kBits;
  }
}

// 4 kLanes bytes so that byte j of a lane is that of the quad's vector j: the lower half of the bytes holds
// words of the first pair, the upper half those of the second.
template <int... kWord>
struct WordOrder {
  typedef uint16_t Words __attribute__((vector_size(kLanes * 4)));
  static U32 interleaved(U32 x) {
    const Words words = reinterpret_cast<Words>(x);
    return reinterpret_cast<U32>(__builtin_shufflevector(words, words, (kWord / 2 + kWord % 2 * kLanes)...));
  }
  static U32 in_order(U32 x) {
    const Words words = reinterpret_cast<Words>(x);
    return reinterpret_cast<U32>(
        __builtin_shufflevector(words, words, (kWord % kLanes * 2 + kWord / kLanes)...));
  }
};
template <int kCount, int... kWord>
struct WordOrderUpTo : WordOrderUpTo<kCount - 1, kCount - 1, kWord...> {};
template <int... kWord>
struct WordOrderUpTo<0, kWord...> : WordOrder<kWord...> {};
using AllWords = WordOrderUpTo<2 * kLanes>;

template <class T>
inline U32 load_quad(const T* from) {
  return AllWords::interleaved(load_lanes(from));
}

// Of vector j byte j.
template <class T>
inline void store_quad(T* to, U32 x0, U32 x1, U32 x2, U32 x3) {
  const U32 lower = choose(broadcast(0xFFu), x0, x1), upper = choose(broadcast(0xFF0000u), x2, x3);
  store_lanes(to, AllWords::in_order(choose(broadcast(0xFFFFu), lower, upper)));
}
