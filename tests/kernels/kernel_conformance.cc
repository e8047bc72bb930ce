// A device's kernels against the CPU's, and their update against the scalar reference that the CPU's is
// tested with, bit for bit. Part of the conformance suite (device_conformance.h): a device without kernels is
// skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cpu_optim/elements.h"
#include "cpu_optim/gradient.h"
#include "cpu_optim/optimizer.h"
#include "cpu_optim/update.h"
#include "device_conformance.h"
#include "kernel_values.h"
#include "kernels/device_kernels.h"
#include "tests/cpu_optim/update_cases.h"
#include "tests/reference/update.h"

namespace overspill::kernels {
namespace {

std::vector<uint16_t> upper_halves(const std::vector<float>& values) {
  std::vector<uint16_t> out;
  for (const float x : values) out.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16));
  return out;
}

std::vector<optim::Fp16> halves(const std::vector<float>& values) {
  std::vector<optim::Fp16> out;
  for (const float x : values) out.push_back({reference_narrow_half(x)});
  return out;
}

template <class T>
constexpr optim::Element kElementOf = optim::Element::fp32;
template <>
constexpr optim::Element kElementOf<uint16_t> = optim::Element::bf16;
template <>
constexpr optim::Element kElementOf<optim::Fp16> = optim::Element::fp16;

float value_of(float x) {
  return x;
}
float value_of(uint16_t bf16) {
  return std::bit_cast<float>(uint32_t{bf16} << 16);
}
float value_of(optim::Fp16 half) {
  return reference_widen_half(half.bits);
}

template <class T>
void expect_same(const std::vector<T>& got, const std::vector<T>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_TRUE(same(value_of(got[i]), value_of(expected[i])))
        << i << ": " << value_of(got[i]) << ", " << value_of(expected[i]);
}

/// The arrays of an update in one run of device memory, each `offset` elements after a multiple of 64 bytes,
/// and bytes between them that nobody may touch.
class Laid {
 public:
  Laid(const optim::Bytes& bytes, int offset) {
    const auto specs = optim::components(bytes.optimizer, bytes.format);
    for (size_t c = 0; c < specs.size(); ++c)
      lay(bytes.components[c], (static_cast<size_t>(offset) + 5 * c) % 16, specs[c].element_bytes);
    lay(bytes.gradient, static_cast<size_t>(offset) + 3, optim::bytes(bytes.element));
    content.resize(content.size() + 64, kBetween);
  }
  std::vector<std::byte> content;
  std::vector<size_t> begins;  // the gradient's is the last

  /// What the content has become, and that nothing else was touched.
  optim::Bytes taken_from(const std::vector<std::byte>& after, const optim::Bytes& start) const {
    optim::Bytes end = start;
    std::vector<std::byte> expected = content;
    for (size_t c = 0; c < start.components.size(); ++c) {
      const auto from = after.begin() + static_cast<std::ptrdiff_t>(begins[c]);
      std::copy_n(from, start.components[c].size(), end.components[c].begin());
      std::ranges::copy(end.components[c], expected.begin() + static_cast<std::ptrdiff_t>(begins[c]));
    }
    EXPECT_TRUE(after == expected) << "something beside the components was touched";
    return end;
  }

 private:
  static constexpr std::byte kBetween{0xA5};
  void lay(const std::vector<std::byte>& bytes, size_t offset, int64_t width) {
    content.resize((content.size() / 64 + 2) * 64 + offset * static_cast<size_t>(width), kBetween);
    begins.push_back(content.size());
    content.insert(content.end(), bytes.begin(), bytes.end());
  }
};

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
    kernels_.squares(stream_, kElementOf<T>, x.data(), count, reinterpret_cast<Squares*>(blocks.data()));
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
      kernels_.take_in(stream_, kElementOf<From>, from.data(), kElementOf<To>, sum.data(),
                       std::ssize(gradient), first);
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
  void expect_mean(const std::vector<float>& sum, const std::vector<T>& before, bool first) {
    const auto count = std::ssize(sum);
    const DeviceMemory from = on_device(sum), to = on_device(before);
    kernels_.take_mean(stream_, reinterpret_cast<const float*>(from.data()), 1.0F / 3.0F, kElementOf<T>,
                       to.data(), count, first);
    std::vector<T> got(before.size()), expected(before.size());
    to_host(to, got);
    std::vector<float> mean = sum;
    optim::scale(std::span(mean), 1.0F / 3.0F);
    if (!first)
      optim::widen(kElementOf<T>, reinterpret_cast<const std::byte*>(before.data()), std::span(mean), false);
    optim::narrow(kElementOf<T>, std::span<const float>(mean), reinterpret_cast<std::byte*>(expected.data()));
    expect_same(got, expected);
  }

  void expect_updated(const optim::Bytes& start, const optim::Step& step, optim::Range range, int offset) {
    const Laid laid(start, offset);
    const DeviceMemory memory = on_device(laid.content);
    std::vector<std::byte*> components;
    for (size_t c = 0; c < start.components.size(); ++c) components.push_back(memory.data() + laid.begins[c]);
    const optim::Piece piece{
        .components = components, .elements = start.elements, .index = step.index, .seed = step.seed};
    kernels_.update(stream_, start.format, piece, {memory.data() + laid.begins.back(), start.element}, range,
                    optim::make_factors(step.hyper, step.step, step.grad_scale));
    std::vector<std::byte> after(laid.content.size());
    to_host(memory, after);
    ASSERT_EQ(difference(laid.taken_from(after, start), expected(start, step, range)), "")
        << optim::name(start.optimizer) << " in " << optim::name(start.format) << ", gradient "
        << static_cast<int>(start.element) << ", elements " << range.begin << " to " << range.end << " of "
        << start.elements << ", offset " << offset;
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

TEST_P(KernelConformance, CopiesWhatItIsGivenAndNoMore) {
  Comparison compare(*device_, *stream_, *kernels_);
  std::vector<uint8_t> content(10'000), got(10'000);
  for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<uint8_t>(i * 7);
  const DeviceMemory memory = compare.on_device(content);
  kernels_->copy(*stream_, memory.data() + 5000, memory.data() + 1001, 3999);
  kernels_->copy(*stream_, memory.data(), memory.data() + 9000, 0);
  compare.to_host(memory, got);
  std::copy_n(content.begin() + 1001, 3999, content.begin() + 5000);
  EXPECT_EQ(got, content);
}

TEST_P(KernelConformance, AddsGradientsAsTheCpuDoes) {
  Comparison compare(*device_, *stream_, *kernels_);
  for (const int64_t count : kCounts) {
    const std::vector wide = {values(count, 1, false), values(count, 2, false), values(count, 3, false)};
    const std::vector narrow = {upper_halves(wide[0]), upper_halves(wide[1]), upper_halves(wide[2])};
    const std::vector half = {halves(wide[0]), halves(wide[1]), halves(wide[2])};
    compare.expect_taken_in<float, float>(wide);
    compare.expect_taken_in<uint16_t, float>(narrow);
    compare.expect_taken_in<uint16_t, uint16_t>(narrow);
    compare.expect_taken_in<optim::Fp16, float>(half);
    compare.expect_taken_in<optim::Fp16, optim::Fp16>(half);
  }
}

TEST_P(KernelConformance, RefusesToNarrowAGradient) {
  using optim::Element;
  Comparison compare(*device_, *stream_, *kernels_);
  const DeviceMemory memory = compare.on_device(values(16, 1));
  for (const auto& [from, to] : {std::pair{Element::fp32, Element::bf16},
                                 {Element::fp32, Element::fp16},
                                 {Element::bf16, Element::fp16},
                                 {Element::fp16, Element::bf16}})
    EXPECT_THROW(kernels_->take_in(*stream_, from, memory.data(), to, memory.data() + 32, 4, true),
                 DeviceError);
}

TEST_P(KernelConformance, TakesMeansAsTheCpuDoes) {
  Comparison compare(*device_, *stream_, *kernels_);
  for (const int64_t count : kCounts) {
    const auto sum = values(count, 11, false), before = values(count, 12, false);
    for (const bool first : {true, false}) {
      compare.expect_mean(sum, before, first);
      compare.expect_mean(sum, upper_halves(before), first);
      compare.expect_mean(sum, halves(before), first);
    }
  }
}

TEST_P(KernelConformance, SumsSquaresAsTheCpuDoes) {
  Comparison compare(*device_, *stream_, *kernels_);
  for (const int64_t count : kCounts) {
    for (const bool finite : {true, false}) {
      compare.expect_squares(values(count, 5, finite));
      compare.expect_squares(upper_halves(values(count, 6, finite)));
      compare.expect_squares(halves(values(count, 7, finite)));
    }
  }
  compare.expect_squares(std::vector<float>());
}

/// Values as in training, and some that are not finite.
optim::Bytes start_of(const optim::Hyper& hyper, optim::Format format, optim::Element element, int64_t count,
                      uint32_t seed) {
  optim::Bytes bytes = random_bytes(optimizer_of(hyper), format, element, count, seed);
  const auto any = values(count, seed, false);
  for (int64_t i = seed % 5; i < count; i += 5)
    i % 2 == 0 ? bytes.set_gradient(i, any[static_cast<size_t>(i)])
               : bytes.set_weight(i, any[static_cast<size_t>(i)]);
  return bytes;
}

template <class Visit>
void for_each_known(const DeviceKernels& kernels, Visit visit) {
  for (const optim::Format format : optim::kFormats) {
    if (!kernels.formats()[static_cast<size_t>(format)]) continue;
    for (const optim::Hyper& hyper : optim::all_hypers()) {
      for (const optim::Element element : optim::kElements) {
        visit(hyper, format, element);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST_P(KernelConformance, UpdatesEveryOptimizerAndFormatAsTheCpuDoes) {
  Comparison compare(*device_, *stream_, *kernels_);
  for_each_known(*kernels_, [&](const optim::Hyper& hyper, optim::Format format, optim::Element element) {
    for (const int64_t count : kUpdatedCounts)
      compare.expect_updated(start_of(hyper, format, element, count, 7), {.hyper = hyper}, {0, count}, 0);
    for (int offset = 0; offset < 16; ++offset)
      compare.expect_updated(start_of(hyper, format, element, 35, 8), {.hyper = hyper}, {0, 35}, offset);
  });
}

/// A range of a piece, whose elements' indexes pass 2^32: they draw with two keys.
TEST_P(KernelConformance, UpdatesARangeAndNoMore) {
  Comparison compare(*device_, *stream_, *kernels_);
  for_each_known(*kernels_, [&](const optim::Hyper& hyper, optim::Format format, optim::Element element) {
    const auto start = start_of(hyper, format, element, 300, 9);
    for (const int64_t index : {int64_t{0}, (int64_t{1} << 32) - 128})
      for (const optim::Range range : {optim::Range{0, 0}, {1, 2}, {77, 240}})
        compare.expect_updated(start, {.hyper = hyper, .step = 1234, .index = index}, range, 1);
  });
}

TEST_P(KernelConformance, RefusesAnUpdateThatDoesNotFitItsPiece) {
  const optim::Factors factors = optim::make_factors(optim::SgdConfig{}, 1, 1.0);
  const DeviceMemory memory = device_->allocate(4096);
  std::byte* const components[] = {memory.data(), memory.data() + 1024};
  const optim::Gradient gradient{memory.data() + 2048, optim::Element::fp32};
  const optim::Piece piece{.components = std::span(components).first(1), .elements = 64};
  EXPECT_THROW(kernels_->update(*stream_, optim::Format::fp32, piece, gradient, {0, 65}, factors),
               std::invalid_argument);
  EXPECT_THROW(kernels_->update(*stream_, optim::Format::exact, piece, gradient, {0, 64}, factors),
               std::invalid_argument);
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
