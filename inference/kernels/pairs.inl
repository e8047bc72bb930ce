// Products of bf16 pairs where the instruction set has none: two fused multiply-adds, the even column first.
// See forms.inl.
struct Pairs {
  using Element = uint16_t;
  static constexpr int64_t kColumns = 2;
  struct Factor {
    F32 even, odd;
  };
  U32 bits;

  static Pairs load_from(const uint16_t* from) {
    Pairs pairs;
    __builtin_memcpy(&pairs.bits, from, sizeof(pairs.bits));
    return pairs;
  }
  static Factor broadcast_from(const uint16_t* from) {
    return {from_bits(broadcast(static_cast<uint32_t>(from[0]) << 16)),
            from_bits(broadcast(static_cast<uint32_t>(from[1]) << 16))};
  }
  static F32 multiply_add(Pairs weights, Factor factor, F32 sum) {
    sum = fma(from_bits(weights.bits << 16), factor.even, sum);
    return fma(from_bits(weights.bits & 0xFFFF0000u), factor.odd, sum);
  }
};
