// Host and simulated device: the conformance suite, and what the simulated one is for.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "device_conformance.h"
#include "gate.h"
#include "kernels/host_device.h"
#include "kernels/simulated_device.h"

namespace overspill::kernels {

DeviceFactory simulated(uint64_t seed) {
  return {"simulated_" + std::to_string(seed), [seed] { return make_simulated_device({.seed = seed}); }};
}

INSTANTIATE_TEST_SUITE_P(All, DeviceConformance,
                         testing::Values(DeviceFactory{"host", make_host_device}, simulated(1), simulated(2),
                                         simulated(3)),
                         factory_name);
INSTANTIATE_TEST_SUITE_P(Simulated, KernelConformance, testing::Values(simulated(1)), factory_name);

namespace {

bool all_poison(const std::byte* data, int64_t bytes) {
  return std::all_of(data, data + bytes, [](std::byte b) { return b == std::byte{0xFF}; });
}

TEST(HostDevice, SharesMemoryAndIsDoneAtOnce) {
  auto device = make_host_device();
  EXPECT_TRUE(device->shares_host_memory());
  auto stream = device->make_stream();
  DeviceMemory memory = device->allocate(8);
  const int64_t sent = 42;
  stream->copy_from_host(memory.data(), &sent, 8);
  EXPECT_TRUE(stream->record().done());
  int64_t seen = 0;
  std::memcpy(&seen, memory.data(), 8);
  EXPECT_EQ(seen, 42);
  stream->copy_to_host(memory.data(), memory.data(), 8);  // in place
  device->poison(memory.data(), 8);
  EXPECT_TRUE(all_poison(memory.data(), 8));
}

TEST(SimulatedDevice, AMissingWaitReadsPoison) {
  auto device = make_simulated_device();
  EXPECT_FALSE(device->shares_host_memory());
  auto copies = device->make_stream(), compute = device->make_stream();
  DeviceMemory memory = device->allocate(64);
  EXPECT_TRUE(all_poison(memory.data(), 64));
  const std::vector<std::byte> sent(64, std::byte{5});
  std::vector<std::byte> early(64), late(64);

  auto gate = std::make_shared<Gate>();
  copies->wait(Event(gate));
  copies->copy_from_host(memory.data(), sent.data(), 64);
  const Event filled = copies->record();
  compute->copy_to_host(early.data(), memory.data(), 64);  // no wait for `filled`
  compute->record().wait();
  EXPECT_TRUE(all_poison(early.data(), 64));
  EXPECT_FALSE(filled.done());
  gate->open();
  compute->wait(filled);
  compute->copy_to_host(late.data(), memory.data(), 64);
  compute->record().wait();
  EXPECT_EQ(late, sent);
}

TEST(SimulatedDevice, AStagingBufferReusedTooEarlyShows) {
  auto device = make_simulated_device();
  auto stream = device->make_stream();
  DeviceMemory memory = device->allocate(64);
  std::vector<std::byte> staging(64, std::byte{1}), back(64);
  auto gate = std::make_shared<Gate>();
  stream->wait(Event(gate));
  stream->copy_from_host(memory.data(), staging.data(), 64);
  std::fill(staging.begin(), staging.end(), std::byte{2});  // before the event
  gate->open();
  stream->copy_to_host(back.data(), memory.data(), 64);
  stream->record().wait();
  EXPECT_EQ(back, staging);
}

TEST(SimulatedDevice, ACopyOfFreedMemoryFailsItsStreamAndThoseThatWaitForIt) {
  auto device = make_simulated_device();
  auto stream = device->make_stream(), other = device->make_stream(), third = device->make_stream();
  DeviceMemory memory = device->allocate(64), kept = device->allocate(64);
  std::vector<std::byte> host(64);
  auto gate = std::make_shared<Gate>();
  const Event before = stream->record();
  stream->wait(Event(gate));
  stream->copy_from_host(memory.data(), host.data(), 64);
  const Event after = stream->record();
  other->wait(after);
  other->copy_from_host(kept.data(), host.data(), 64);
  const Event dependent = other->record();
  memory = DeviceMemory();
  gate->open();
  before.wait();
  EXPECT_THROW(after.wait(), DeviceError);
  EXPECT_THROW(after.wait(), DeviceError);
  EXPECT_TRUE(after.done());
  EXPECT_THROW(dependent.wait(), DeviceError);
  third->copy_to_host(host.data(), kept.data(), 64);
  third->record().wait();
  EXPECT_TRUE(all_poison(host.data(), 64)) << "work behind a failed wait was done";
  device->verify_freed_memory();  // the copy was refused, so nothing was written
}

TEST(SimulatedDevice, CopiesStayInsideTheirAllocation) {
  auto device = make_simulated_device();
  DeviceMemory memory = device->allocate(64);
  std::byte host[128] = {};
  for (const auto& [begin, bytes] :
       {std::pair{memory.data(), 65}, {memory.data() + 64, 1}, {memory.data() - 1, 2}, {host, 1}}) {
    auto stream = device->make_stream();
    stream->copy_from_host(begin, host, bytes);
    EXPECT_THROW(stream->record().wait(), DeviceError);
  }
  EXPECT_THROW(device->poison(memory.data() + 60, 5), DeviceError);
}

TEST(SimulatedDevice, CopiesHaveTheHostAtOneEnd) {
  const auto device = make_simulated_device();
  const auto stream = device->make_stream();
  const DeviceMemory memory = device->allocate(128);
  EXPECT_THROW(stream->copy_from_host(memory.data(), memory.data() + 64, 64), DeviceError);
  EXPECT_THROW(stream->copy_to_host(memory.data() + 127, memory.data(), 1), DeviceError);
}

TEST(SimulatedDevice, FreedMemoryIsPoisonAndWritesToItAreFound) {
  auto device = make_simulated_device();
  DeviceMemory memory = device->allocate(1000);
  std::byte* const stale = memory.data();
  std::memset(stale, 1, 1000);  // compute of the test, as a kernel would
  memory = DeviceMemory();
  EXPECT_TRUE(all_poison(stale, 1000));
  EXPECT_EQ(device->used_bytes(), 0);
  device->verify_freed_memory();

  memory = device->allocate(1000);
  std::byte* const again = memory.data();
  memory = DeviceMemory();
  again[999] = std::byte{0};
  EXPECT_THROW(device->verify_freed_memory(), DeviceError);
  device->verify_freed_memory();  // told once
}

TEST(SimulatedDevice, WritesAfterFreeAreToldByTheNextAllocation) {
  auto device = make_simulated_device({.quarantine_bytes = 8192});
  DeviceMemory memory = device->allocate(10);
  std::byte* const stale = memory.data();
  memory = DeviceMemory();
  stale[0] = std::byte{0};
  memory = device->allocate(8192);
  memory = DeviceMemory();  // pushes the first block out of quarantine
  EXPECT_THROW((void)device->allocate(1), DeviceError);
  EXPECT_EQ(device->allocate(1).bytes(), 1);
}

TEST(SimulatedDevice, WritesPastTheEndAreFound) {
  auto device = make_simulated_device();
  DeviceMemory memory = device->allocate(1000);
  memory.data()[1000] = std::byte{0};
  memory = DeviceMemory();
  EXPECT_THROW(device->verify_freed_memory(), DeviceError);
}

TEST(SimulatedDeviceDeathTest, WritesAfterFreeNobodyWasToldOfAbort) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        auto device = make_simulated_device();
        std::byte* const stale = device->allocate(10).data();
        *stale = std::byte{0};
        device.reset();
      },
      "were written after they were freed");
}

TEST(SimulatedDevice, HasItsMemoryLimit) {
  auto device = make_simulated_device({.memory_bytes = 10'000});
  DeviceMemory first = device->allocate(6'000);
  EXPECT_THROW((void)device->allocate(4'001), std::bad_alloc);
  DeviceMemory second = device->allocate(4'000);
  EXPECT_EQ(device->used_bytes(), 10'000);
  first = DeviceMemory();
  first = device->allocate(6'000);
}

TEST(SimulatedDevice, CountsCopiesOfMemoryThatIsNotPinned) {
  auto device = make_simulated_device();
  auto stream = device->make_stream();
  const DeviceMemory memory = device->allocate(64);
  std::byte host[64] = {};
  {
    const HostPin pin = device->pin_host(host, 32);
    stream->copy_from_host(memory.data(), host, 32);
    stream->copy_to_host(host + 31, memory.data(), 1);
    EXPECT_EQ(device->unpinned_copies(), 0);
    stream->copy_to_host(host + 31, memory.data(), 2);
    EXPECT_EQ(device->unpinned_copies(), 1);
    stream->record().wait();
  }
  stream->copy_from_host(memory.data(), host, 32);
  EXPECT_EQ(device->unpinned_copies(), 2);
  stream->record().wait();
  EXPECT_THROW((void)device->pin_host(host, -1), DeviceError);
}

TEST(SimulatedDevice, PoisonsOnlyWhenAskedTo) {
  auto device = make_simulated_device({.poison = false});
  DeviceMemory memory = device->allocate(4);
  std::memset(memory.data(), 3, 4);
  device->poison(memory.data(), 4);
  EXPECT_EQ(memory.data()[0], std::byte{3});
}

TEST(SimulatedDevice, RefusesDelaysThatMakeNoSense) {
  using std::chrono::microseconds;
  EXPECT_THROW(make_simulated_device({.delay_min = microseconds(2), .delay_max = microseconds(1)}),
               DeviceError);
  EXPECT_THROW(make_simulated_device({.delay_min = microseconds(-2), .delay_max = microseconds(1)}),
               DeviceError);
}

}  // namespace
}  // namespace overspill::kernels
