#include "cpu_optim/gradient.h"

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

}  // namespace

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
