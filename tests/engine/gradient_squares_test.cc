// Sums of squares that a device takes: how often it is asked, and that they are the host's.
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "cpu_optim/optimizer.h"
#include "engine/engine.h"
#include "engine/resources.h"
#include "kernels/simulated_device.h"
#include "tests/engine/around_device.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Resources;

constexpr int64_t kChunk = 8192;  // elements

/// Sixteen chunks, a small one, and five that begin in the middle of a block.
std::vector<engine::UnitSpec> wide_unit() {
  return {
      {"wide",
       optim::Format::exact,
       "BF16",
       {{"wide.weight", {128, 1024}, 0, {}}, {"wide.bias", {100}, 0, {}}, {"wide.out", {40, 1024}, 0, {}}}}};
}

struct Trained {
  double norm = 0;
  std::vector<int64_t> squared;  // elements of each time that the device was asked
};

Trained train_on(const std::string& name) {
  Trained found;
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.device_budget_bytes = 8 << 20;
  config.chunk_elements = kChunk;
  config.placement = engine::Placement::host;
  Resources resources = make_resources(wide_unit(), config, {name, "memory", 1});
  if (name == "simulated") {
    resources.device = std::make_shared<AroundDevice>(
        kernels::make_simulated_device(),
        DeviceHooks{.before_squares = [&](int64_t count) { found.squared.push_back(count); }});
  }
  const std::shared_ptr<kernels::Device> device = resources.device;
  Engine engine(wide_unit(), config, std::move(resources));
  const auto queue = device->make_stream();
  engine.begin_pass({true, true});
  (void)engine.acquire(0, {queue->native()});
  for (int s = 0; s < 3; ++s) {
    const auto& segment = engine.layout().units[0].segments[static_cast<size_t>(s)];
    const std::vector<float> seen(static_cast<size_t>(segment.elements), 0.5F);
    const auto bytes = toy_gradient_bytes("BF16", seen, 0, s, 0, 0, 0);
    auto there = std::make_shared<kernels::DeviceMemory>(device->allocate(std::ssize(bytes)));
    queue->copy_from_host(there->data(), bytes.data(), std::ssize(bytes));
    queue->record().wait();
    const std::byte* const data = there->data();
    engine.add_gradient(0, s, engine::DeviceArray{data, std::ssize(bytes), "BF16", std::move(there)},
                        {queue->native()});
  }
  found.norm = engine.step(std::vector<optim::Hyper>(1, optim::AdamConfig{})).norm;
  engine.close();
  return found;
}

/// One kernel a chunk fills a GPU badly, and each waits for the one before: on an H100 those of a 7 B model
/// took longer than its backward pass of 4,096 tokens.
TEST(GradientSquares, AreTakenOfAWholeGradientAtOnce) {
  const Trained there = train_on("simulated");
  constexpr int64_t kFirst = kChunk - 128;  // beside the bias, which is padded to that
  EXPECT_EQ(there.squared, (std::vector<int64_t>{128 * 1024, 100, kFirst, 40 * 1024 - kFirst}));
  EXPECT_EQ(there.norm, train_on("host").norm);
  EXPECT_GT(there.norm, 0);
}

}  // namespace
}  // namespace overspill::testing
