#include "bench/intake/limits.h"

#include <cstring>

#include "kernels/widest.h"

namespace overspill::bench {
namespace {

typedef uint64_t Line __attribute__((vector_size(64)));
constexpr int64_t kAhead = 2048;  // bytes, asked for

INLINE void load(const std::byte* at, Line& line) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at) + kAhead));
  std::memcpy(&line, at, sizeof(line));
}

template <bool kPastCache>
INLINE void store(std::byte* to, const Line& line) {
#if defined(__clang__)
  if constexpr (kPastCache) {
    __builtin_nontemporal_store(line, reinterpret_cast<Line*>(to));
    return;
  }
#elif defined(__x86_64__)
  if constexpr (kPastCache) {
    asm volatile("vmovntdq %1, %0" : "=m"(*reinterpret_cast<Line*>(to)) : "v"(line));
    return;
  }
#endif
  std::memcpy(to, &line, sizeof(line));
}

template <bool kPastCache, int kWidth, bool kChange>
INLINE void loop(const std::byte* from, std::byte* to, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 32) {
    Line read;
    load(from + i * 2, read);
#pragma GCC unroll 2
    for (int64_t byte = 0; byte < 32 * kWidth; byte += 64) {
      std::byte* const at = to + i * kWidth + byte;
      Line line = read;
      if constexpr (kChange) {
        load(at, line);
        line ^= read;
      }
      store<kPastCache>(at, line);
    }
  }
}

// NOLINTBEGIN(bugprone-macro-parentheses): TARGET is an attribute
#define LIMIT(NAME, TARGET, PAST_CACHE)                                                \
  TARGET void write2_##NAME(const std::byte* f, std::byte* t, int64_t b, int64_t e) {  \
    loop<PAST_CACHE, 2, false>(f, t, b, e);                                            \
  }                                                                                    \
  TARGET void write4_##NAME(const std::byte* f, std::byte* t, int64_t b, int64_t e) {  \
    loop<PAST_CACHE, 4, false>(f, t, b, e);                                            \
  }                                                                                    \
  TARGET void change4_##NAME(const std::byte* f, std::byte* t, int64_t b, int64_t e) { \
    loop<PAST_CACHE, 4, true>(f, t, b, e);                                             \
  }
// NOLINTEND(bugprone-macro-parentheses)
LIMIT(plain, WIDEST, false)
constexpr IntakeLimit kPlain{write2_plain, write4_plain, change4_plain};
#if defined(__x86_64__)
LIMIT(past, __attribute__((target("avx512f"))), true)
constexpr IntakeLimit kBoth[] = {kPlain, {write2_past, write4_past, change4_past}};
#else
constexpr IntakeLimit kBoth[] = {kPlain};
#endif

}  // namespace

std::span<const IntakeLimit> intake_limits() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512f")) return std::span(kBoth).first(1);
#endif
  return kBoth;
}

}  // namespace overspill::bench
