// A device's kernels against the CPU's update, bit for bit. Part of the conformance suite
// (device_conformance.h): a device without kernels is skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu_optim/gradient.h"
#include "cpu_optim/optimizer.h"
#include "cpu_optim/update.h"
#include "device_conformance.h"
#include "kernel_values.h"
#include "kernels/device_kernels.h"

namespace overspill::kernels {
namespace {

std::vector<uint16_t> upper_halves(const std::vector<float>& values) {
  std::vector<uint16_t> out;
  for (const float x : values) out.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16));
  return out;
}

template <class T>
constexpr Float kTypeOf = sizeof(T) == 2 ? Float::bf16 : Float::fp32;
template <class T>
constexpr optim::Element kElementOf = sizeof(T) == 2 ? optim::Element::bf16 : optim::Element::fp32;

float value_of(float x) {
  return x;
}
float value_of(uint16_t bf16) {
  return std::bit_cast<float>(uint32_t{bf16} << 16);
}

template <class T>
void expect_same(const std::vector<T>& got, const std::vector<T>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_TRUE(same(value_of(got[i]), value_of(expected[i])))
        << i << ": " << value_of(got[i]) << ", " << value_of(expected[i]);
}

/// A weight with its moments, as the CPU keeps them: split (`lo` is not empty) or in fp32.
struct Model {
  Model(int64_t count, uint32_t seed, bool split) {
    p = values(count, seed);
    if (split) {
      for (const float x : p) {
        const auto bits = std::bit_cast<uint32_t>(x);
        hi.push_back(static_cast<uint16_t>((bits + 0x8000U) >> 16));
        lo.push_back(static_cast<int16_t>(static_cast<int32_t>(bits - (uint32_t{hi.back()} << 16))));
      }
    }
    m = values(count, seed + 1);
    v = values(count, seed + 2);
    for (float& x : v) x = std::fabs(x);
  }
  std::vector<float> p;
  std::vector<uint16_t> hi;
  std::vector<int16_t> lo;
  std::vector<float> m, v;

  bool split() const { return !lo.empty(); }
  std::vector<float> master() const {
    if (!split()) return p;
    std::vector<float> out;
    for (size_t i = 0; i < hi.size(); ++i)
      out.push_back(
          std::bit_cast<float>((uint32_t{hi[i]} << 16) + static_cast<uint32_t>(static_cast<int32_t>(lo[i]))));
    return out;
  }

  void update_on_the_cpu(optim::Gradient gradient, const optim::Factors& factors) {
    std::vector<std::byte*> components;
    if (split()) {
      components = {reinterpret_cast<std::byte*>(hi.data()), reinterpret_cast<std::byte*>(lo.data())};
    } else {
      components = {reinterpret_cast<std::byte*>(p.data())};
    }
    components.push_back(reinterpret_cast<std::byte*>(m.data()));
    components.push_back(reinterpret_cast<std::byte*>(v.data()));
    const auto count = std::ssize(m);
    optim::update(split() ? optim::Format::exact : optim::Format::fp32,
                  {.components = components, .elements = count}, gradient, {0, count}, factors);
  }
};

void expect_same(const Model& got, const Model& expected) {
  expect_same(got.master(), expected.master());
  expect_same(got.hi, expected.hi);
  expect_same(got.m, expected.m);
  expect_same(got.v, expected.v);
}

/// AdamW at its first and at a late step, and Adam with decay, to be maximized.
std::vector<optim::Factors> cases() {
  return {
      optim::make_factors(optim::AdamConfig{.lr = 3e-4, .weight_decay = 0.1}, 1, 0.37),
      optim::make_factors(optim::AdamConfig{.lr = 1e-2, .beta2 = 0.95}, 1234, 1.0),
      optim::make_factors(
          optim::AdamConfig{.lr = 1e-3, .weight_decay = 0.3, .decoupled = false, .maximize = true}, 7, 0.5)};
}

AdamFactors of(const optim::Factors& factors) {
  const auto& f = std::get<optim::Adam::Factors>(factors.of);
  return {f.l2,
          f.decay,
          f.one_minus_beta1,
          f.beta2,
          f.one_minus_beta2,
          f.minus_step_size,
          f.inverse_sqrt_bias2,
          f.eps,
          factors.grad_scale};
}

/// What is compared, on the device and on the CPU.
class Comparison {
 public:
  Comparison(Device& device, Stream& stream, DeviceKernels& kernels)
      : device_(device), stream_(stream), kernels_(kernels) {}

  template <class T>
  DeviceMemory on_device(const std::vector<T>& host) {
    const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
    DeviceMemory memory = device_.allocate(bytes);
    stream_.copy_from_host(memory.data(), host.data(), bytes);
    stream_.record().wait();
    return memory;
  }
  template <class T>
  void to_host(const DeviceMemory& memory, std::vector<T>& host) {
    stream_.copy_to_host(host.data(), memory.data(), memory.bytes());
    stream_.record().wait();
  }

  template <class T>
  void expect_squares(const std::vector<T>& from) {
    const auto count = std::ssize(from);
    const DeviceMemory x = on_device(from);
    std::vector<Squares> got(static_cast<size_t>(squares_blocks(count)));
    const DeviceMemory blocks = on_device(got);
    kernels_.squares(stream_, kTypeOf<T>, x.data(), count, reinterpret_cast<Squares*>(blocks.data()));
    to_host(blocks, got);
    Squares total;
    for (const Squares& block : got) {
      total.sum += block.sum;
      total.not_finite |= block.not_finite;
    }
    const optim::Squares expected = optim::squares(std::span<const T>(from));
    EXPECT_EQ(total.sum, expected.sum) << count;
    EXPECT_EQ(total.not_finite == 0, expected.finite) << count;
  }

  /// The first is as it was given, each later one is added.
  template <class From, class To>
  void expect_taken_in(const std::vector<std::vector<From>>& gradients) {
    std::vector<To> expected(gradients[0].size()), got(expected.size());
    const DeviceMemory sum = on_device(expected);
    bool first = true;
    for (const std::vector<From>& gradient : gradients) {
      const DeviceMemory from = on_device(gradient);
      kernels_.take_in(stream_, kTypeOf<From>, from.data(), kTypeOf<To>, sum.data(), std::ssize(gradient),
                       first);
      to_host(sum, got);
      if constexpr (sizeof(From) == sizeof(To)) {
        if (first) expected = gradient;
        if (!first) optim::accumulate(std::span<const From>(gradient), std::span<To>(expected));
      } else {
        if (first) optim::widen(std::span<const From>(gradient), std::span<To>(expected));
        if (!first) optim::accumulate(std::span<const From>(gradient), std::span<To>(expected));
      }
      expect_same(got, expected);
      first = false;
    }
  }

  template <class T>
  void expect_updated(const Model& start, const std::vector<T>& gradient, const optim::Factors& factors) {
    const DeviceMemory p = on_device(start.p), hi = on_device(start.hi), lo = on_device(start.lo),
                       m = on_device(start.m), v = on_device(start.v), g = on_device(gradient);
    const AdamArrays arrays{start.split() ? hi.data() : p.data(), reinterpret_cast<int16_t*>(lo.data()),
                            reinterpret_cast<float*>(m.data()), reinterpret_cast<float*>(v.data())};
    kernels_.update_adam(stream_, arrays, kTypeOf<T>, g.data(), std::ssize(gradient), of(factors));
    Model got = start, expected = start;
    if (!start.split()) to_host(p, got.p);
    to_host(hi, got.hi);
    to_host(lo, got.lo);
    to_host(m, got.m);
    to_host(v, got.v);
    expected.update_on_the_cpu({gradient.data(), kElementOf<T>}, factors);
    expect_same(got, expected);
  }

 private:
  Device& device_;
  Stream& stream_;
  DeviceKernels& kernels_;
};

}  // namespace

void KernelConformance::SetUp() {
  DeviceConformance::SetUp();
  if (IsSkipped()) return;
  kernels_ = device_->kernels();
  if (kernels_ == nullptr) GTEST_SKIP() << device_->name() << " has no kernels";
  stream_ = device_->make_stream();
}

TEST_P(KernelConformance, ClearsWhatItIsGivenAndNoMore) {
  Comparison compare(*device_, *stream_, *kernels_);
  const DeviceMemory memory = compare.on_device(std::vector<uint8_t>(10'000, 7));
  kernels_->clear(*stream_, memory.data() + 1000, 5000);
  kernels_->clear(*stream_, memory.data(), 0);
  std::vector<uint8_t> got(10'000);
  compare.to_host(memory, got);
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], i >= 1000 && i < 6000 ? 0 : 7) << i;
}

TEST_P(KernelConformance, AddsGradientsAsTheCpuDoes) {
  Comparison compare(*device_, *stream_, *kernels_);
  for (const int64_t count : kCounts) {
    const std::vector wide = {values(count, 1, false), values(count, 2, false), values(count, 3, false)};
    const std::vector narrow = {upper_halves(wide[0]), upper_halves(wide[1]), upper_halves(wide[2])};
    compare.expect_taken_in<float, float>(wide);
    compare.expect_taken_in<uint16_t, float>(narrow);
    compare.expect_taken_in<uint16_t, uint16_t>(narrow);
  }
}

TEST_P(KernelConformance, RefusesToNarrowAGradient) {
  Comparison compare(*device_, *stream_, *kernels_);
  const DeviceMemory memory = compare.on_device(values(16, 1));
  EXPECT_THROW(
      kernels_->take_in(*stream_, Float::fp32, memory.data(), Float::bf16, memory.data() + 32, 4, true),
      DeviceError);
}

TEST_P(KernelConformance, SumsSquaresAsTheCpuDoes) {
  Comparison compare(*device_, *stream_, *kernels_);
  for (const int64_t count : kCounts) {
    for (const bool finite : {true, false}) {
      compare.expect_squares(values(count, 5, finite));
      compare.expect_squares(upper_halves(values(count, 6, finite)));
    }
  }
  compare.expect_squares(std::vector<float>());
}

TEST_P(KernelConformance, UpdatesAsTheCpuDoes) {
  Comparison compare(*device_, *stream_, *kernels_);
  for (const optim::Factors& factors : cases()) {
    for (const int64_t count : kCounts) {
      const auto gradient = values(count, 8, false);
      for (const bool split : {true, false}) {
        const Model start(count, 7, split);
        compare.expect_updated(start, gradient, factors);
        compare.expect_updated(start, upper_halves(gradient), factors);
      }
    }
  }
}

TEST_P(KernelConformance, RefusesStreamsOfOtherDevices) {
  struct Elsewhere final : Stream {
    void copy_from_host(void*, const void*, int64_t) override {}
    void copy_to_host(void*, const void*, int64_t) override {}
    Event record() override { return {}; }
    void wait(const Event&) override {}
    void* native() override { return nullptr; }
  } elsewhere;
  const DeviceMemory memory = device_->allocate(64);
  EXPECT_THROW(kernels_->clear(elsewhere, memory.data(), 64), DeviceError);
}

}  // namespace overspill::kernels
