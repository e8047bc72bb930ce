// For instruction sets that have no instruction of their own for it.

// By byte: a mask's bytes are all ones or zero.
inline U32 choose(U32 mask, U32 yes, U32 no) {
  return (mask & yes) | (~mask & no);
}

// Conversions.

inline U32 extend(U16 x) {
  return __builtin_convertvector(x, U32);
}
inline U32 extend(I16 x) {
  return reinterpret_cast<U32>(__builtin_convertvector(x, I32));
}
inline U16 lower_halves(U32 x) {
  return __builtin_convertvector(x, U16);
}

// fp16, as the instructions of other sets convert it: a NaN is made quiet and keeps its upper bits.

inline F32 widen_half(U16 half) {
  const U32 bits = extend(half);
  const U32 magnitude = (bits & 0x7FFFu) << 13;
  const U32 finite = bits_of(from_bits(magnitude) * 0x1p112f);  // exact, denormals too
  const U32 special = magnitude | 0x7F800000u | (mask_of(magnitude > 0x0F800000u) & 0x400000u);
  return from_bits(choose(mask_of(magnitude >= 0x0F800000u), special, finite) | ((bits & 0x8000u) << 16));
}

inline U16 narrow_half(F32 x) {
  const U32 magnitude = bits_of(x) & 0x7FFFFFFFu;
  const U32 sign = (bits_of(x) ^ magnitude) >> 16;
  const U32 normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  const U32 denormal = bits_of(from_bits(magnitude) + 0.5f) - 0x3F000000u;  // the addition rounds
  U32 half = choose(mask_of(magnitude < 0x38800000u), denormal, normal);
  half = choose(mask_of(magnitude >= 0x47800000u), broadcast(0x7C00u), half);
  const U32 nan = mask_of(magnitude > 0x7F800000u);
  half = choose(nan, ((magnitude >> 13) & 0x3FFu) | 0x7E00u, half);
  return lower_halves(half | sign);
}
