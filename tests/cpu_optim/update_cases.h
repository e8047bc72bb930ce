// Updates of every optimizer in every format, run by a kernel and by the scalar reference on the same bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpu_optim/dispatch.h"
#include "cpu_optim/update.h"
#include "tests/watched.h"

namespace overspill::optim {

constexpr Format kFormats[] = {Format::fp32, Format::exact, Format::fp16, Format::compact, Format::eight_bit};
constexpr Element kElements[] = {Element::bf16, Element::fp16, Element::fp32};
constexpr int kFormsLanesMax = 16;

// Where a case takes long: under sanitizers, and emulated (tools/neon).
#if defined(OVERSPILL_FEWER_CASES)
constexpr bool kFewer = true;
#else
constexpr bool kFewer = kWatched;
#endif

/// Every optimizer, with each of its options on and off.
std::span<const Hyper> all_hypers();

struct Step {
  Hyper hyper;
  int64_t step = 3;
  double grad_scale = 0.37;
  uint64_t seed = 11;
  int64_t index = 0;
};

/// A piece's bytes and its gradient.
struct Bytes {
  Optimizer optimizer;
  Format format;
  Element element;
  int64_t elements;
  std::vector<std::vector<std::byte>> components;
  std::vector<std::byte> gradient;

  Bytes(Optimizer optimizer, Format format, Element element, int64_t elements);
  float weight(int64_t i) const;
  void set_weight(int64_t i, float x);
  float state(int k, int64_t i) const;
  void set_gradient(int64_t i, float x);
};

/// Values as in training, mixed with denormals, zeros and any finite bit pattern.
Bytes random_bytes(Optimizer optimizer, Format format, Element element, int64_t elements, uint32_t seed);

/// The reference's result.
Bytes expected(const Bytes& start, const Step& step, Range range);
/// The kernel's, in memory whose component k starts (offset + 5 k) mod 16 elements after a 64-byte boundary.
/// Even offsets prefetch as for AMD's cores, odd ones as for others.
/// Fails the test if anything outside is touched.
Bytes actual(const Kernels& form, const Bytes& start, const Step& step, Range range, int offset);

/// How results differ, for the message; empty if they agree bit for bit (a NaN's payload aside).
std::string difference(const Bytes& actual, const Bytes& want);

std::string describe(const Kernels& form, const Bytes& bytes, Range range, int offset);

}  // namespace overspill::optim
