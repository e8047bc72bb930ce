#include "bench/adam/limits.h"

#include <cstring>

#include "kernels/widest.h"

// Each loop works on lines of 64 bytes.
namespace overspill::bench {
namespace {

typedef uint64_t Line __attribute__((vector_size(64)));
using Streams = std::byte* const*;

enum class Use { change, write };
template <int kBytes_, Use kUse_ = Use::change>
struct Stream {
  static constexpr int kBytes = kBytes_;
  static constexpr Use kUse = kUse_;
};

// Lines are asked for ahead, into the first-level or the second-level cache.
enum class Ahead { no, first_level, second_level };
enum class Store { plain, past_cache };
constexpr int64_t kHalfPage = 2048;  // how far ahead the update asks
template <int kElements_, Ahead kAsk_, Store kStore_, int64_t kBytesAhead_ = 0>
struct Form {
  static constexpr int kElements = kElements_;  // of each stream at a time
  static constexpr Ahead kAsk = kAsk_;
  static constexpr Store kStore = kStore_;
  static constexpr int64_t kBytesAhead = kBytesAhead_;  // 0: of the cache's own many elements
};

template <class F, int kBytes>
INLINE void ask_for(const std::byte* at) {
  if constexpr (F::kAsk != Ahead::no) {
    constexpr bool kFirst = F::kAsk == Ahead::first_level;
    constexpr int64_t kElementsAhead = kFirst ? 512 : 256;
    constexpr int64_t kBytesAhead = F::kBytesAhead > 0 ? F::kBytesAhead : kElementsAhead * kBytes;
    for (int byte = 0; byte < F::kElements * kBytes; byte += 64) {
      __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) +
                                                       static_cast<uintptr_t>(kBytesAhead + byte)),
                         0, kFirst ? 3 : 2);
    }
  }
}

template <class F>
INLINE void put(std::byte* to, const Line& line) {
#if defined(__x86_64__) && !defined(__clang__)  // clang does not see which vectors a clone has
  if constexpr (F::kStore == Store::past_cache) {
    asm volatile("vmovntdq %1, %0" : "=m"(*reinterpret_cast<Line*>(to)) : "v"(line));
    return;
  }
#endif
  std::memcpy(to, &line, sizeof(line));
}

template <class F, class S>
INLINE void use(std::byte* stream, int64_t i, const Line& by) {
  std::byte* const at = stream + i * S::kBytes;
  if constexpr (S::kUse == Use::change) ask_for<F, S::kBytes>(at);
#pragma GCC unroll 16
  for (int byte = 0; byte < F::kElements * S::kBytes; byte += 64) {
    Line line = by;
    if constexpr (S::kUse == Use::change) {
      std::memcpy(&line, at + byte, sizeof(line));
      line ^= by;
    }
    put<F>(at + byte, line);
  }
}

template <class F, int kGradBytes, class... S>
INLINE void loop(Streams streams, const std::byte* gradient, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += F::kElements) {
    const std::byte* const grad = gradient + i * kGradBytes;
    ask_for<F, kGradBytes>(grad);
    Line all{};
#pragma GCC unroll 16
    for (int byte = 0; byte < F::kElements * kGradBytes; byte += 64) {
      Line line;
      std::memcpy(&line, grad + byte, sizeof(line));
      all |= line;
    }
    all &= 1;
    int k = 0;
    (use<F, S>(streams[k++], i, all), ...);
  }
}

// A form's loops for all formats, in the order of the enumeration.
#define FORM(NAME, TARGET, ...)                                                            \
  using F_##NAME = Form<__VA_ARGS__>;                                                      \
  TARGET void fp32_##NAME(Streams s, const std::byte* g, int64_t b, int64_t e) {           \
    loop<F_##NAME, 4, Stream<4>, Stream<4>, Stream<4>>(s, g, b, e);                        \
  }                                                                                        \
  TARGET void exact_##NAME(Streams s, const std::byte* g, int64_t b, int64_t e) {          \
    loop<F_##NAME, 2, Stream<2>, Stream<2>, Stream<4>, Stream<4>>(s, g, b, e);             \
  }                                                                                        \
  TARGET void fp16_##NAME(Streams s, const std::byte* g, int64_t b, int64_t e) {           \
    loop<F_##NAME, 2, Stream<2, Use::write>, Stream<4>, Stream<4>, Stream<4>>(s, g, b, e); \
  }                                                                                        \
  TARGET void compact_##NAME(Streams s, const std::byte* g, int64_t b, int64_t e) {        \
    loop<F_##NAME, 2, Stream<2>, Stream<2>, Stream<2>, Stream<2>>(s, g, b, e);             \
  }                                                                                        \
  TARGET void eight_bit_##NAME(Streams s, const std::byte* g, int64_t b, int64_t e) {      \
    loop<F_##NAME, 2, Stream<2>, Stream<1>, Stream<1>, Stream<1>>(s, g, b, e);             \
  }
#define LOOPS(NAME) \
  { fp32_##NAME, exact_##NAME, fp16_##NAME, compact_##NAME, eight_bit_##NAME }
static_assert(optim::kFormatCount == 5 && static_cast<int>(optim::Format::fp32) == 0 &&
              static_cast<int>(optim::Format::exact) == 1 && static_cast<int>(optim::Format::fp16) == 2 &&
              static_cast<int>(optim::Format::compact) == 3 &&
              static_cast<int>(optim::Format::eight_bit) == 4);

FORM(by64, WIDEST, 64, Ahead::no, Store::plain)
FORM(by64_ahead, WIDEST, 64, Ahead::first_level, Store::plain)
FORM(by64_ahead_even, WIDEST, 64, Ahead::first_level, Store::plain, kHalfPage)
FORM(by64_ahead_l2, WIDEST, 64, Ahead::second_level, Store::plain)
FORM(by128_ahead_l2, WIDEST, 128, Ahead::second_level, Store::plain, kHalfPage)
FORM(by256, WIDEST, 256, Ahead::no, Store::plain)
FORM(by256_ahead, WIDEST, 256, Ahead::first_level, Store::plain)
FORM(by1024, WIDEST, 1024, Ahead::no, Store::plain)
#if defined(__x86_64__)
FORM(by64_past_cache, __attribute__((target("avx512f"))), 64, Ahead::first_level, Store::past_cache)
#endif

// The last one needs AVX-512.
constexpr LimitForm kForms[] = {{"64", LOOPS(by64)},
                                {"64-prefetched", LOOPS(by64_ahead)},
                                {"64-prefetched-2K", LOOPS(by64_ahead_even)},
                                {"64-prefetched-L2", LOOPS(by64_ahead_l2)},
                                {"128-prefetched-L2", LOOPS(by128_ahead_l2)},
                                {"256", LOOPS(by256)},
                                {"256-prefetched", LOOPS(by256_ahead)},
                                {"1024", LOOPS(by1024)},
#if defined(__x86_64__)
                                {"64-non-temporal", LOOPS(by64_past_cache)}
#endif
};

}  // namespace

std::span<const LimitForm> limit_forms() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512f")) return std::span(kForms).first(std::size(kForms) - 1);
#endif
  return kForms;
}

}  // namespace overspill::bench
