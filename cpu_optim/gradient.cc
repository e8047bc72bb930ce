#include "cpu_optim/gradient.h"

#include "cpu_optim/dispatch.h"
#include "cpu_optim/floating_point.h"
#include "cpu_optim/sizes.h"

namespace overspill::optim {

Squares squares(std::span<const uint16_t> bf16) {
  const FloatingPointMode mode;
  return kernels().squares_bf16(bf16.data(), std::ssize(bf16));
}

Squares squares(std::span<const float> fp32) {
  const FloatingPointMode mode;
  return kernels().squares_fp32(fp32.data(), std::ssize(fp32));
}

void widen(std::span<const uint16_t> bf16, std::span<float> fp32) {
  check_size("widen", "fp32", fp32.size(), bf16.size());
  const FloatingPointMode mode;
  kernels().widen(bf16.data(), fp32.data(), std::ssize(bf16));
}

void narrow(std::span<const float> fp32, std::span<uint16_t> bf16) {
  check_size("narrow", "bf16", bf16.size(), fp32.size());
  const FloatingPointMode mode;
  kernels().narrow(fp32.data(), bf16.data(), std::ssize(fp32));
}

void accumulate(std::span<const uint16_t> from, std::span<uint16_t> to) {
  check_size("accumulate", "to", to.size(), from.size());
  const FloatingPointMode mode;
  kernels().accumulate_bf16_bf16(from.data(), to.data(), std::ssize(from));
}

void accumulate(std::span<const uint16_t> from, std::span<float> to) {
  check_size("accumulate", "to", to.size(), from.size());
  const FloatingPointMode mode;
  kernels().accumulate_bf16_fp32(from.data(), to.data(), std::ssize(from));
}

void accumulate(std::span<const float> from, std::span<float> to) {
  check_size("accumulate", "to", to.size(), from.size());
  const FloatingPointMode mode;
  kernels().accumulate_fp32_fp32(from.data(), to.data(), std::ssize(from));
}

void scale(std::span<float> to, float factor) {
  const FloatingPointMode mode;
  kernels().scale(to.data(), factor, std::ssize(to));
}

}  // namespace overspill::optim
