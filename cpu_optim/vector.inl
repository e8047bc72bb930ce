// A small vector type: kLanes 32-bit lanes, as the compilers' vector extension has it, so + - * / & | << >>
// and comparisons are written as for numbers. Included once per instruction set, inside its namespace, after
// kLanes is set. What the extension lacks (fma, square root, widening to double, masked access) follows in
// the form's own file.

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
};
using F32 = VectorOf<float>::type;
using U32 = VectorOf<uint32_t>::type;
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
