// Included by the forms whose registers of bytes have as many as a table: 16.

#include "inference/kernels/bytes.inl"

inline I32 load_integers(const int8_t* from) {
  typedef int8_t Integers __attribute__((vector_size(kLanes)));
  Integers integers;
  __builtin_memcpy(&integers, from, sizeof(integers));
  return __builtin_convertvector(integers, I32);
}
inline Bytes repeat_16(const uint8_t* from) {
  return load_bytes(from);
}
