// Gradients that a framework hands over on the device, before the work that makes them is done.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/engine_failed.h"
#include "kernels/simulated_device.h"
#include "tests/engine/device_case.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"
#include "tests/kernels/gate.h"

namespace overspill::testing {
namespace {

using engine::DeviceArray;
using engine::Engine;
using engine::Placement;
using engine::Queue;

TEST(DeviceGradient, ThatDoesNotFitIsRefusedAtOnce) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine({}, device);
  auto queue = device->make_stream();
  auto memory = std::make_shared<kernels::DeviceMemory>(device->allocate(64));
  const auto give = [&](int unit, int64_t bytes, const char* dtype) {
    engine->add_gradient(unit, 0, DeviceArray{memory->data(), bytes, dtype, memory}, Queue{queue->native()});
  };
  EXPECT_THROW(give(0, 64, "BF16"), std::invalid_argument) << "too short";
  EXPECT_THROW(give(0, 97 * 64 * 2, "F16"), std::invalid_argument) << "another dtype";
  EXPECT_THROW(give(3, 2000, "F32"), std::invalid_argument) << "frozen";
  EXPECT_THROW(give(99, 64, "F32"), std::invalid_argument) << "no such unit";
  EXPECT_FALSE(engine->has_gradient(0, 0));
}

/// Memory that is no device memory: the copy fails late, and the engine says so.
TEST(DeviceGradient, ThatCannotBeCopiedFailsTheEngine) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine({}, device);
  auto queue = device->make_stream();
  const auto host = std::make_shared<std::vector<std::byte>>(97 * 64 * 2);
  engine->add_gradient(0, 0, DeviceArray{host->data(), std::ssize(*host), "BF16", host},
                       Queue{queue->native()});
  EXPECT_THROW(engine->step(toy_groups(0)), engine::EngineFailed);
}

/// It is let go, and its memory may be given to somebody else, once it has been taken in; and not before.
TEST(DeviceGradient, IsKeptUntilItIsTakenIn) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine({}, device);
  auto queue = device->make_stream();
  const auto gate = std::make_shared<kernels::Gate>();
  queue->wait(kernels::Event(gate));
  const int64_t bytes = 97 * 64 * 2;
  auto memory = std::make_shared<kernels::DeviceMemory>(device->allocate(bytes));
  const std::weak_ptr<kernels::DeviceMemory> watched = memory;
  const std::vector<std::byte> ones(static_cast<size_t>(bytes), std::byte{0x3f});
  queue->copy_from_host(memory->data(), ones.data(), bytes);
  const std::byte* const data = memory->data();
  engine->add_gradient(0, 0, DeviceArray{data, bytes, "BF16", std::move(memory)}, Queue{queue->native()});
  EXPECT_FALSE(watched.expired());
  gate->open();
  EXPECT_TRUE(engine->has_gradient(0, 0));
  EXPECT_TRUE(watched.expired());
  std::vector<float> gradient(97 * 64);
  engine->read_state(0, 0, "grad", gradient);
  EXPECT_EQ(gradient, std::vector<float>(97 * 64, toy_widened("BF16", ones.data(), 1)[0]));
}

/// As a layer that is used twice gives it: the second comes while the first is under way.
TEST(DeviceGradient, OfOneWeightTwiceIsTheSum) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine({.micro_batches = 2}, device);
  auto queue = device->make_stream();
  const auto gate = std::make_shared<kernels::Gate>();
  queue->wait(kernels::Event(gate));
  const std::vector<std::byte> ones(97 * 64 * 2, std::byte{0x3f});
  for (int i = 0; i < 2; ++i) {
    auto memory = std::make_shared<kernels::DeviceMemory>(device->allocate(std::ssize(ones)));
    queue->copy_from_host(memory->data(), ones.data(), std::ssize(ones));
    const std::byte* const data = memory->data();
    engine->add_gradient(0, 0, DeviceArray{data, std::ssize(ones), "BF16", std::move(memory)},
                         Queue{queue->native()});
  }
  gate->open();
  std::vector<float> gradient(97 * 64);
  engine->read_state(0, 0, "grad", gradient);
  EXPECT_EQ(gradient, std::vector<float>(97 * 64, 2 * toy_widened("BF16", ones.data(), 1)[0]));
}

/// What was not taken in when the engine is closed is let go.
TEST(DeviceGradient, IsDroppedByClose) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine({}, device);
  auto queue = device->make_stream();
  const auto gate = std::make_shared<kernels::Gate>();
  queue->wait(kernels::Event(gate));
  auto memory = std::make_shared<kernels::DeviceMemory>(device->allocate(97 * 64 * 2));
  const std::weak_ptr<kernels::DeviceMemory> watched = memory;
  const std::byte* const data = memory->data();
  for (int i = 0; i < 3; ++i)
    engine->add_gradient(0, 0, DeviceArray{data, 97 * 64 * 2, "BF16", memory}, Queue{queue->native()});
  memory.reset();
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate->open();
  });
  engine->close();
  opens.join();
  EXPECT_TRUE(watched.expired());
}

/// A later gradient of the unit is on its way when the last one that is expected has been taken in: a guess
/// made then would lack it, and nobody would take the guess back.
TEST(DeviceGradient, ThatIsOnItsWayIsInNoGuess) {
  const DeviceCase guessing{.placement = Placement::host, .speculate = true};
  std::shared_ptr<kernels::Device> device, host_device;
  const auto engine = device_engine(guessing, device);
  DeviceCase plain = guessing;
  plain.device = "host";
  plain.device_budget_bytes = 0;
  const auto host = device_engine(plain, host_device);
  const auto gradient = [](const Engine& of, int segment, int step) {
    const engine::Unit& u = of.layout().units[0];
    const std::vector<float> seen(static_cast<size_t>(u.segments[segment].elements), 0.5F);
    return toy_gradient_bytes(u.dtype, seen, 0, segment, step, 0, 0);
  };
  struct Late {
    std::shared_ptr<kernels::Gate> gate = std::make_shared<kernels::Gate>();
    std::unique_ptr<kernels::Stream> queue;
  };
  std::vector<Late> lates;
  const auto give = [&](int segment, int step, bool late) {
    const auto bytes = gradient(*engine, segment, step);
    auto there = std::make_shared<kernels::DeviceMemory>(device->allocate(std::ssize(bytes)));
    Late own{.queue = device->make_stream()};
    own.queue->copy_from_host(there->data(), bytes.data(), std::ssize(bytes));
    own.queue->record().wait();
    if (late) own.queue->wait(kernels::Event(own.gate));
    const std::byte* const data = there->data();
    engine->add_gradient(0, segment,
                         DeviceArray{data, std::ssize(bytes), engine->layout().units[0].dtype, there},
                         Queue{own.queue->native()});
    lates.push_back(std::move(own));
    host->add_gradient(0, segment, gradient(*host, segment, step), host->layout().units[0].dtype);
  };
  const auto step = [&](int number) {
    engine->step(toy_groups(number));
    host->step(toy_groups(number));
    engine->expect_step(toy_groups(number + 1));
  };
  engine->expect_step(toy_groups(0));
  for (int number : {0, 1}) {  // what the next step is expected to be like
    for (int segment : {0, 1}) give(segment, number, false);
    step(number);
  }
  lates.clear();
  give(0, 2, true);
  give(1, 2, true);
  give(0, 3, true);
  const auto a_while = std::chrono::milliseconds(20);
  lates[0].gate->open();
  std::this_thread::sleep_for(a_while);  // the third has begun
  lates[1].gate->open();
  std::this_thread::sleep_for(a_while);  // a guess would be made
  lates[2].gate->open();
  step(2);
  expect_same_bits(toy_contents(*engine), toy_contents(*host), "a gradient on its way");
}

}  // namespace
}  // namespace overspill::testing
