// Leases on the queue of a framework that is ahead of the device: their memory stays for the work that uses
// it.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/memory/budget.h"
#include "kernels/simulated_device.h"
#include "tests/engine/device_case.h"
#include "tests/engine/framework.h"
#include "tests/engine/toy_model.h"
#include "tests/kernels/gate.h"

namespace overspill::testing {
namespace {

using engine::Lease;
using engine::Queue;

/// Nothing of it has been done when the caller is through with forward.
TEST(DeviceQueue, MayBeFarBehindItsCaller) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine({}, device);
  ASSERT_LT(engine->plan().gather_device_bytes, [&] {
    int64_t all = 0;
    for (const engine::Unit& u : engine->layout().units) all += u.bytes();
    return all;
  }()) << "units must give way to each other for this test to mean anything";
  Framework framework(*device);
  const auto gate = std::make_shared<kernels::Gate>();
  framework.stream().wait(kernels::Event(gate));
  double loss = 0;
  constexpr int kPasses = 3;
  const auto units = static_cast<int>(engine->layout().units.size());
  for (int pass = 0; pass < kPasses; ++pass) {
    engine->begin_pass({false, false});
    for (int u = 0; u < units; ++u) framework.forward(*engine, u, loss);
  }
  EXPECT_EQ(loss, 0);
  gate->open();
  framework.stream().record().wait();
  std::shared_ptr<kernels::Device> host_device;
  const auto host = device_engine({.device = "host"}, host_device);
  double expected = 0;
  for (int u = 0; u < units * kPasses; ++u)
    expected += toy_forward(*host, host->acquire(u % units), u % units);
  EXPECT_EQ(loss, expected);
}

/// Two queues use one lease; its memory is kept for both.
TEST(DeviceQueue, MayBeOneOfSeveral) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine({.poison = true}, device);
  auto first = device->make_stream(), second = device->make_stream();
  const auto gate = std::make_shared<kernels::Gate>();
  const auto units = static_cast<int>(engine->layout().units.size());
  std::vector<std::byte> seen;
  std::thread opens;
  {
    Lease lease = engine->acquire(0, Queue{first->native()});
    seen.resize(static_cast<size_t>(lease.bytes()));
    lease.use_on(Queue{second->native()});
    lease.use_on(Queue{second->native()});
    second->wait(kernels::Event(gate));
    second->copy_to_host(seen.data(), lease.data(), lease.bytes());
  }
  opens = std::thread([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate->open();
  });
  for (int round = 0; round < 2; ++round) {  // its memory is wanted
    for (int u = units - 1; u > 0; --u) (void)engine->acquire(u);
  }
  opens.join();
  second->record().wait();
  std::vector<std::byte> expected(seen.size());
  engine->acquire(0).copy_to_host(0, expected);
  EXPECT_EQ(seen, expected);
}

/// Leases that are kept fill the device; who is refused is told which budget it is about, and all goes on.
TEST(DeviceQueue, IsRefusedWhereKeptLeasesLeaveNoRoom) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine({}, device);
  auto queue = device->make_stream();
  {
    std::vector<Lease> kept;
    try {
      for (int u = 0; u < static_cast<int>(engine->layout().units.size()); ++u)
        kept.push_back(engine->acquire(u, Queue{queue->native()}));
      FAIL() << "all units fit";
    } catch (const engine::BudgetError& error) {
      const std::string told = error.what();
      EXPECT_NE(told.find("raise the device budget"), std::string::npos) << told;
      EXPECT_NE(told.find(engine->layout().units[0].name), std::string::npos) << told;
    }
  }
  for (int u = 0; u < static_cast<int>(engine->layout().units.size()); ++u)
    (void)engine->acquire(u, Queue{queue->native()});
}

/// A lease, and work that uses it, outlive the engine.
TEST(DeviceQueue, OutlivesTheEngine) {
  std::shared_ptr<kernels::Device> device;
  auto engine = device_engine({}, device);
  std::vector<std::byte> expected(static_cast<size_t>(engine->layout().units[1].bytes())),
      seen(expected.size());
  engine->acquire(1).copy_to_host(0, expected);
  auto queue = device->make_stream();
  const auto gate = std::make_shared<kernels::Gate>();
  Lease lease = engine->acquire(1, Queue{queue->native()});
  queue->wait(kernels::Event(gate));
  queue->copy_to_host(seen.data(), lease.data(), lease.bytes());
  engine.reset();
  const kernels::Event read = queue->record();
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate->open();
  });
  opens.join();
  read.wait();
  EXPECT_EQ(seen, expected);
}

}  // namespace
}  // namespace overspill::testing
