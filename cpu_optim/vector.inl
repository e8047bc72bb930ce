// A small vector type: kLanes 32-bit lanes, as the compilers' vector extension has it, so + - * / & | << >>
// and comparisons are written as for numbers. Included once per instruction set, inside its namespace, after
// kLanes is set. What the extension lacks (fma, square root, fp16, narrowing, masked access) follows in the
// form's own file.

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <>
struct VectorOf<Fp16> {
  typedef uint16_t type __attribute__((vector_size(kLanes * 2)));
};
using F32 = VectorOf<float>::type;
using U32 = VectorOf<uint32_t>::type;
using I32 = VectorOf<int32_t>::type;
using U16 = VectorOf<uint16_t>::type;
using I16 = VectorOf<int16_t>::type;
typedef double F64 __attribute__((vector_size(kLanes * 4)));  // half as many lanes

// Which lanes of an access exist: all, or the first `count` (1 to kLanes) at the end of an array.
struct All {};
struct First {
  int64_t count;
};

inline U32 bits_of(F32 x) {
  return reinterpret_cast<U32>(x);
}
inline F32 from_bits(U32 bits) {
  return reinterpret_cast<F32>(bits);
}
inline F32 broadcast(float x) {
  return x - F32{};
}  // minus, because -0 + 0 is +0
inline U32 broadcast(uint32_t x) {
  return x + U32{};
}
inline U32 mask_of(I32 comparison) {
  return reinterpret_cast<U32>(comparison);
}
inline U32 larger(U32 a, U32 b) {
  return a > b ? a : b;
}

template <uint32_t... kLane>
struct Lanes {
  static constexpr U32 kNumbers = {kLane...};
  template <int kDistance>
  static U32 exchanged(U32 x) {
    return __builtin_shufflevector(x, x, (kLane ^ kDistance)...);
  }
};
template <int kCount, uint32_t... kLane>
struct LanesUpTo : LanesUpTo<kCount - 1, static_cast<uint32_t>(kCount - 1), kLane...> {};
template <uint32_t... kLane>
struct LanesUpTo<0, kLane...> : Lanes<kLane...> {};
using AllLanes = LanesUpTo<kLanes>;

// The largest lane.
template <int kDistance = kLanes / 2>
inline uint32_t largest_lane(U32 x) {
  if constexpr (kDistance == 0) {
    return x[0];
  } else {
    return largest_lane<kDistance / 2>(larger(x, AllLanes::exchanged<kDistance>(x)));
  }
}

template <class T>
inline typename VectorOf<T>::type load(const T* from, All) {
  typename VectorOf<T>::type x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
template <class T>
inline void store(T* to, typename VectorOf<T>::type x, All) {
  __builtin_memcpy(to, &x, sizeof(x));
}
