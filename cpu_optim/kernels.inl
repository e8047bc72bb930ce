// The math, written once. Included once per instruction set, inside its namespace, after the vector type
// (vector.inl) and the form's own fma, sqrt, conversions and masked access. A tail is the same body with its
// last lanes masked.

template <class Body>
inline void for_each_vector(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) body(i, All{});
  if (i < end) body(i, First{end - i});
}

// Values as fp32, whatever they are stored as.

template <class Part>
inline F32 load_values(const float* from, Part part) {
  return load(from, part);
}
template <class Part>
inline F32 load_values(const uint16_t* from, Part part) {
  return from_bits(extend(load(from, part)) << 16);
}
template <class Part>
inline F32 load_values(const Fp16* from, Part part) {
  return widen_half(load(from, part));
}
template <class Part>
inline void store_values(float* to, F32 x, Part part) {
  store(to, x, part);
}
// To bf16, nearest even: adding 0x7FFF carries into the upper half above the middle, and on it where the
// upper half is odd. The sum would carry a NaN over into a number, so NaN becomes the quiet 0x7FC0, as in
// torch.
template <class Part>
inline void store_values(uint16_t* to, F32 x, Part part) {
  const U32 bits = bits_of(x);
  const U32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const U32 nan = mask_of((bits & 0x7FFFFFFFu) > 0x7F800000u);
  store(to, lower_halves((rounded & ~nan) | (nan & 0x7FC0u)), part);
}
template <class Part>
inline void store_values(Fp16* to, F32 x, Part part) {
  store(to, narrow_half(x), part);
}

// What an optimizer computes with: lanes of fp32, and numbers that all lanes share.
struct V {
  F32 x;

  V() = default;
  V(F32 lanes) : x(lanes) {}
  V(float all) : x(broadcast(all)) {}
  friend V operator+(V a, V b) { return a.x + b.x; }
  friend V operator-(V a, V b) { return a.x - b.x; }
  friend V operator*(V a, V b) { return a.x * b.x; }
  friend V operator/(V a, V b) { return a.x / b.x; }
};
inline V fma(V a, V b, V c) {
  return fma(a.x, b.x, c.x);
}
inline V sqrt(V x) {
  return sqrt(x.x);
}
// -1, 0 or 1; 0 for NaN, as in torch.
inline V sign(V x) {
  return from_bits((mask_of(x.x > 0.0f) & 0x3F800000u) | (mask_of(x.x < 0.0f) & 0xBF800000u));
}
inline V abs(V x) {
  return from_bits(bits_of(x.x) & 0x7FFFFFFFu);
}
// NaN where one of them is.
inline V larger(V a, V b) {
  return from_bits(choose(mask_of(a.x > b.x) | mask_of(a.x != a.x), bits_of(a.x), bits_of(b.x)));
}

#include "cpu_optim/interleave.inl"

#include "cpu_optim/formats.inl"
#include "cpu_optim/gradient.inl"
#include "cpu_optim/update.inl"

constexpr Kernels make_table() {
  Kernels table{};
  table.name = kName;
  Optimizers::for_each([&]<class T>(int i) { fill_row<T>(table.update[i]); });
  table.squares_bf16 = squares;
  table.squares_fp16 = squares;
  table.squares_fp32 = squares;
  table.widen_bf16 = convert;
  table.widen_fp16 = convert;
  table.narrow_bf16 = convert;
  table.narrow_fp16 = convert;
  table.accumulate_bf16_bf16 = add_to;
  table.accumulate_bf16_fp32 = add_to;
  table.accumulate_fp16_fp16 = add_to;
  table.accumulate_fp16_fp32 = add_to;
  table.accumulate_fp32_fp32 = add_to;
  table.scale = scale;
  return table;
}
constexpr Kernels kTable = make_table();
