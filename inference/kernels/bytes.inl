// A register of bytes. See forms.inl.
typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));
inline Bytes load_bytes(const uint8_t* from) {
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}
inline void store_bytes(uint16_t* to, Bytes bytes) {
  __builtin_memcpy(to, &bytes, sizeof(bytes));
}
