// The CUDA kernels against the CPU's update, bit for bit: their per-element source on this machine (math.h),
// and the kernels themselves where there is a GPU.
#include "kernels/cuda/cuda_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "cpu_optim/gradient.h"
#include "cpu_optim/optimizer.h"
#include "cpu_optim/update.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/math.h"

namespace overspill::kernels::cuda {
namespace {

/// Numbers of every magnitude; one in 16 is special. `finite`: no inf and no NaN.
std::vector<float> values(int64_t count, uint32_t seed, bool finite = true) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float special[] = {0.0F, -0.0F, 1e-45F, -1e-40F, 1.00390625F, 3.4e38F, kInf, -kInf, std::nanf("")};
  std::mt19937 random(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) {
    x = std::ldexp(static_cast<float>(random() >> 8) - 8'388'608.0F, static_cast<int>(random() % 60) - 60);
    if (random() % 16 == 0) x = special[random() % (finite ? 6 : 9)];
  }
  return out;
}

std::vector<uint16_t> upper_halves(const std::vector<float>& values) {
  std::vector<uint16_t> out;
  for (const float x : values) out.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16));
  return out;
}

/// A NaN's payload aside.
bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

constexpr int64_t kCounts[] = {1, 31, 32, 33, 4095, 4096, 4097, 100'003};

/// A master with states: as the CPU keeps them.
struct Model {
  explicit Model(int64_t count, uint32_t seed) {
    for (const float p : values(count, seed)) {
      const auto bits = std::bit_cast<uint32_t>(p);
      hi.push_back(static_cast<uint16_t>((bits + 0x8000U) >> 16));
      lo.push_back(static_cast<int16_t>(static_cast<int32_t>(bits - (uint32_t{hi.back()} << 16))));
    }
    m = values(count, seed + 1);
    v = values(count, seed + 2);
    for (float& x : v) x = std::fabs(x);
  }
  std::vector<uint16_t> hi;
  std::vector<int16_t> lo;
  std::vector<float> m, v;

  void update_on_the_cpu(optim::Gradient gradient, const optim::Factors& factors) {
    std::byte* const components[] = {
        reinterpret_cast<std::byte*>(hi.data()), reinterpret_cast<std::byte*>(lo.data()),
        reinterpret_cast<std::byte*>(m.data()), reinterpret_cast<std::byte*>(v.data())};
    const auto count = std::ssize(hi);
    optim::update(optim::Format::exact, {.components = components, .elements = count}, gradient, {0, count},
                  factors);
  }
};

void expect_same(const Model& got, const Model& expected) {
  for (size_t i = 0; i < expected.hi.size(); ++i) {
    const auto master = [&](const Model& model) {
      return std::bit_cast<float>((uint32_t{model.hi[i]} << 16) +
                                  static_cast<uint32_t>(static_cast<int32_t>(model.lo[i])));
    };
    ASSERT_TRUE(same(master(got), master(expected))) << i << ": " << master(got) << ", " << master(expected);
    ASSERT_TRUE(same(got.m[i], expected.m[i])) << i << ": " << got.m[i] << ", " << expected.m[i];
    ASSERT_TRUE(same(got.v[i], expected.v[i])) << i << ": " << got.v[i] << ", " << expected.v[i];
  }
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

// ---- on this machine: the same source, compiled for the host

TEST(CudaMath, NarrowsAsTheCpuDoes) {
  const auto from = values(200'000, 1, false);
  std::vector<uint16_t> expected(from.size());
  optim::narrow(std::span(from), std::span(expected));
  for (size_t i = 0; i < from.size(); ++i) ASSERT_EQ(narrow(from[i]), expected[i]) << from[i];
}

TEST(CudaMath, SumsSquaresAsTheCpuDoes) {
  for (const int64_t count : kCounts) {
    for (const bool finite : {true, false}) {
      const auto from = values(count, 2, finite);
      double total = 0;
      bool all_finite = true;
      for (int64_t begin = 0; begin < count; begin += kSquaresBlock) {
        SquaresLane lanes[32];
        for (int64_t i = begin; i < std::min(count, begin + kSquaresBlock); ++i) lanes[i % 32].add(from[i]);
        for (int width = 16; width > 0; width /= 2) {
          for (int lane = 0; lane < width; ++lane) lanes[lane].sum += lanes[lane + width].sum;
        }
        total += lanes[0].sum;
        for (const SquaresLane& lane : lanes) all_finite = all_finite && lane.finite;
      }
      const optim::Squares expected = optim::squares(std::span<const float>(from));
      EXPECT_EQ(total, expected.sum) << count;
      EXPECT_EQ(all_finite, expected.finite) << count;
    }
  }
}

TEST(CudaMath, UpdatesAsTheCpuDoes) {
  for (const optim::Factors& factors : cases()) {
    for (const bool bf16 : {false, true}) {
      const auto gradient = values(100'003, 9, false);
      const auto narrowed = upper_halves(gradient);
      Model got(std::ssize(gradient), 3), expected = got;
      for (size_t i = 0; i < gradient.size(); ++i) {
        update_adam(of(factors), bf16 ? widen(narrowed[i]) : widen(gradient[i]), got.hi[i], got.lo[i],
                    got.m[i], got.v[i]);
      }
      if (bf16) {
        expected.update_on_the_cpu({narrowed.data(), optim::Element::bf16}, factors);
      } else {
        expected.update_on_the_cpu({gradient.data(), optim::Element::fp32}, factors);
      }
      expect_same(got, expected);
    }
  }
}

// ---- on a GPU

class CudaKernels : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_cuda(); !why.empty()) GTEST_SKIP() << why;
    device_ = make_cuda_device();
    stream_ = device_->make_stream();
  }

  template <class T>
  DeviceMemory on_device(const std::vector<T>& host) {
    const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
    DeviceMemory memory = device_->allocate(bytes);
    stream_->copy_from_host(memory.data(), host.data(), bytes);
    return memory;
  }
  template <class T>
  void to_host(const DeviceMemory& memory, std::vector<T>& host) {
    stream_->copy_to_host(host.data(), memory.data(), memory.bytes());
    stream_->record().wait();
  }

  template <class T>
  void expect_squares(const std::vector<T>& from) {
    const auto count = std::ssize(from);
    const DeviceMemory x = on_device(from);
    const DeviceMemory blocks = on_device(std::vector<Squares>(static_cast<size_t>(squares_blocks(count))));
    const DeviceMemory total = on_device(std::vector<Squares>(1));
    squares(*stream_, reinterpret_cast<const T*>(x.data()), count, reinterpret_cast<Squares*>(blocks.data()),
            reinterpret_cast<Squares*>(total.data()));
    std::vector<Squares> got(1);
    to_host(total, got);
    const optim::Squares expected = optim::squares(std::span<const T>(from));
    EXPECT_EQ(got[0].sum, expected.sum) << count;
    EXPECT_EQ(got[0].not_finite == 0, expected.finite) << count;
  }

  template <class T>
  Model updated(const Model& model, const std::vector<T>& gradient, const AdamFactors& factors) {
    const DeviceMemory hi = on_device(model.hi), lo = on_device(model.lo), m = on_device(model.m),
                       v = on_device(model.v), g = on_device(gradient);
    const AdamArrays arrays{reinterpret_cast<uint16_t*>(hi.data()), reinterpret_cast<int16_t*>(lo.data()),
                            reinterpret_cast<float*>(m.data()), reinterpret_cast<float*>(v.data())};
    update_adam(*stream_, arrays, reinterpret_cast<const T*>(g.data()), std::ssize(gradient), factors);
    Model out = model;
    to_host(hi, out.hi);
    to_host(lo, out.lo);
    to_host(m, out.m);
    to_host(v, out.v);
    return out;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Stream> stream_;
};

TEST_F(CudaKernels, NarrowAndScaleAsTheCpuDoes) {
  for (const int64_t count : kCounts) {
    auto from = values(count, 4, false);
    const DeviceMemory x = on_device(from);
    const DeviceMemory to = device_->allocate(count * 2);
    narrow(*stream_, reinterpret_cast<const float*>(x.data()), reinterpret_cast<uint16_t*>(to.data()), count);
    scale(*stream_, reinterpret_cast<float*>(x.data()), 0.3F, count);
    std::vector<uint16_t> narrowed(from.size()), expected(from.size());
    std::vector<float> scaled(from.size());
    to_host(to, narrowed);
    to_host(x, scaled);
    optim::narrow(std::span<const float>(from), std::span(expected));
    optim::scale(std::span(from), 0.3F);
    EXPECT_EQ(narrowed, expected);
    for (size_t i = 0; i < from.size(); ++i) ASSERT_TRUE(same(scaled[i], from[i])) << i;
  }
}

TEST_F(CudaKernels, SumSquaresAsTheCpuDoes) {
  for (const int64_t count : kCounts) {
    for (const bool finite : {true, false}) {
      expect_squares(values(count, 5, finite));
      expect_squares(upper_halves(values(count, 6, finite)));
    }
  }
  expect_squares(std::vector<float>());
}

TEST_F(CudaKernels, UpdateAsTheCpuDoes) {
  for (const optim::Factors& factors : cases()) {
    for (const int64_t count : kCounts) {
      const auto gradient = values(count, 8, false);
      const auto narrowed = upper_halves(gradient);
      const Model start(count, 7);
      Model expected = start;
      expected.update_on_the_cpu({gradient.data(), optim::Element::fp32}, factors);
      expect_same(updated(start, gradient, of(factors)), expected);
      expected = start;
      expected.update_on_the_cpu({narrowed.data(), optim::Element::bf16}, factors);
      expect_same(updated(start, narrowed, of(factors)), expected);
    }
  }
}

TEST_F(CudaKernels, RefuseStreamsOfOtherDevices) {
  struct Elsewhere final : Stream {
    void copy_from_host(void*, const void*, int64_t) override {}
    void copy_to_host(void*, const void*, int64_t) override {}
    Event record() override { return {}; }
    void wait(const Event&) override {}
    void* native() override { return nullptr; }
  } elsewhere;
  EXPECT_THROW(scale(elsewhere, nullptr, 1, 1), DeviceError);
}

}  // namespace
}  // namespace overspill::kernels::cuda
