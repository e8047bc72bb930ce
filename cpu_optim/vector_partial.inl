// Masked access for instruction sets without masks: through a buffer of one vector. Lanes that do not exist
// read as zero.

template <class T>
inline typename VectorOf<T>::type load(const T* from, First part) {
  typename VectorOf<T>::type x{};
  __builtin_memcpy(&x, from, static_cast<size_t>(part.count) * sizeof(T));
  return x;
}
template <class T>
inline void store(T* to, typename VectorOf<T>::type x, First part) {
  __builtin_memcpy(to, &x, static_cast<size_t>(part.count) * sizeof(T));
}
