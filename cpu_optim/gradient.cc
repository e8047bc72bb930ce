#include "cpu_optim/gradient.h"

#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "cpu_optim/dispatch.h"
#include "cpu_optim/floating_point.h"
#include "cpu_optim/sizes.h"

namespace overspill::optim {

namespace {

template <class From, class To>
void checked(const char* function, std::span<const From> from, std::span<To> to,
             void (*kernel)(const From*, To*, int64_t)) {
  check_size(function, "to", to.size(), from.size());
  const FloatingPointMode mode;
  kernel(from.data(), to.data(), std::ssize(from));
}

#if defined(__x86_64__)
constexpr int64_t kLine = 64;
constexpr int64_t kPastCaches = 256 << 10;  // bytes; what is smaller may be read while it is in a cache

/// Whole lines, to an address that is a multiple of a line's.
void copy_lines_past_caches(const std::byte* from, std::byte* to, int64_t bytes) {
  constexpr int64_t kAhead = 2048;
  for (int64_t line = 0; line < bytes; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) +
                                                     static_cast<uintptr_t>(line + kAhead)));
    for (int64_t i = line; i < line + kLine; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
  _mm_sfence();
}
#endif

}  // namespace

void copy_for_later(std::span<const std::byte> from, std::span<std::byte> to) {
  check_size("copy_for_later", "to", to.size(), from.size());
  const auto bytes = std::ssize(from);
  int64_t done = 0;
#if defined(__x86_64__)
  if (bytes >= kPastCaches) {
    const int64_t head = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(to.data())) & (kLine - 1);
    const int64_t lines = (bytes - head) / kLine * kLine;
    std::memcpy(to.data(), from.data(), static_cast<size_t>(head));
    copy_lines_past_caches(from.data() + head, to.data() + head, lines);
    done = head + lines;
  }
#endif
  std::memcpy(to.data() + done, from.data() + done, static_cast<size_t>(bytes - done));
}

Squares squares(std::span<const uint16_t> bf16) {
  const FloatingPointMode mode;
  return kernels().squares_bf16(bf16.data(), std::ssize(bf16));
}

Squares squares(std::span<const Fp16> fp16) {
  const FloatingPointMode mode;
  return kernels().squares_fp16(fp16.data(), std::ssize(fp16));
}

Squares squares(std::span<const float> fp32) {
  const FloatingPointMode mode;
  return kernels().squares_fp32(fp32.data(), std::ssize(fp32));
}

void widen(std::span<const uint16_t> bf16, std::span<float> fp32) {
  checked("widen", bf16, fp32, kernels().widen_bf16);
}

void widen(std::span<const Fp16> fp16, std::span<float> fp32) {
  checked("widen", fp16, fp32, kernels().widen_fp16);
}

void narrow(std::span<const float> fp32, std::span<uint16_t> bf16) {
  checked("narrow", fp32, bf16, kernels().narrow_bf16);
}

void narrow(std::span<const float> fp32, std::span<Fp16> fp16) {
  checked("narrow", fp32, fp16, kernels().narrow_fp16);
}

void accumulate(std::span<const uint16_t> from, std::span<uint16_t> to) {
  checked("accumulate", from, to, kernels().accumulate_bf16_bf16);
}

void accumulate(std::span<const uint16_t> from, std::span<float> to) {
  checked("accumulate", from, to, kernels().accumulate_bf16_fp32);
}

void accumulate(std::span<const Fp16> from, std::span<Fp16> to) {
  checked("accumulate", from, to, kernels().accumulate_fp16_fp16);
}

void accumulate(std::span<const Fp16> from, std::span<float> to) {
  checked("accumulate", from, to, kernels().accumulate_fp16_fp32);
}

void accumulate(std::span<const float> from, std::span<float> to) {
  checked("accumulate", from, to, kernels().accumulate_fp32_fp32);
}

void scale(std::span<float> to, float factor) {
  const FloatingPointMode mode;
  kernels().scale(to.data(), factor, std::ssize(to));
}

}  // namespace overspill::optim
