#include "device_conformance.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

namespace overspill::kernels {
namespace {

std::vector<std::byte> numbered(int64_t bytes, uint32_t seed) {
  std::vector<std::byte> data(bytes);
  std::minstd_rand random(seed + 1);
  for (std::byte& b : data) b = static_cast<std::byte>(random() >> 8);
  return data;
}

TEST_P(DeviceConformance, AllocationsAreAlignedAndMovable) {
  for (int64_t bytes : {1, 4095, 4096, 4097, 1 << 20}) {
    DeviceMemory memory = device_->allocate(bytes);
    EXPECT_EQ(memory.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 4096, 0u);
    std::byte* const data = memory.data();
    DeviceMemory moved(std::move(memory));
    EXPECT_EQ(memory.data(), nullptr);
    EXPECT_EQ(moved.data(), data);
    moved = DeviceMemory();
  }
  EXPECT_EQ(device_->allocate(0).bytes(), 0);
  EXPECT_THROW((void)device_->allocate(-1), DeviceError);
  EXPECT_FALSE(device_->name().empty());
}

TEST_P(DeviceConformance, RoundTripsEverySize) {
  auto stream = device_->make_stream();
  for (int64_t bytes :
       {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{4096}, int64_t{4097}, int64_t{1} << 20}) {
    const auto sent = numbered(bytes, 1);
    std::vector<std::byte> back(bytes);
    DeviceMemory memory = device_->allocate(bytes);
    stream->copy_from_host(memory.data(), sent.data(), bytes);
    stream->copy_to_host(back.data(), memory.data(), bytes);
    stream->record().wait();
    EXPECT_EQ(back, sent);
  }
}

struct Free {
  void operator()(std::byte* data) const { std::free(data); }
};
using Pages = std::unique_ptr<std::byte, Free>;

Pages pages(int64_t bytes) {
  return Pages(static_cast<std::byte*>(std::aligned_alloc(4096, static_cast<size_t>(bytes))));
}

TEST_P(DeviceConformance, PinnedMemoryRoundTripsAndIsOrdinaryAgain) {
  constexpr int64_t kBytes = 1 << 20;
  const Pages host = pages(kBytes);
  const auto sent = numbered(kBytes, 5);
  DeviceMemory memory = device_->allocate(kBytes);
  auto stream = device_->make_stream();
  for (int round = 0; round < 3; ++round) {
    HostPin pin = device_->pin_host(host.get(), kBytes);
    const HostPin moved = std::move(pin);
    std::copy(sent.begin(), sent.end(), host.get());
    stream->copy_from_host(memory.data(), host.get(), kBytes);
    stream->record().wait();
    std::fill_n(host.get(), kBytes, std::byte{0});
    stream->copy_to_host(host.get() + 4096, memory.data(), kBytes - 4096);  // a part of what is pinned
    stream->record().wait();
    EXPECT_TRUE(std::equal(sent.begin(), sent.end() - 4096, host.get() + 4096));
  }
  stream->copy_to_host(host.get(), memory.data(), kBytes);
  stream->record().wait();
  EXPECT_TRUE(std::equal(sent.begin(), sent.end(), host.get()));
  EXPECT_EQ(device_->pin_host(host.get(), 0).bytes(), 0);
}

/// Copies of one direction do not wait for those of the other, so each is checked while both run.
TEST_P(DeviceConformance, CopiesBothWaysAtOnce) {
  constexpr int64_t kBytes = 1 << 20;
  const Pages up = pages(kBytes), down = pages(kBytes);
  const HostPin up_pin = device_->pin_host(up.get(), kBytes),
                down_pin = device_->pin_host(down.get(), kBytes);
  auto in = device_->make_stream(), out = device_->make_stream();
  DeviceMemory filling = device_->allocate(kBytes), emptying = device_->allocate(kBytes);
  const auto first = numbered(kBytes, 1), second = numbered(kBytes, 2);
  std::copy(first.begin(), first.end(), up.get());
  in->copy_from_host(emptying.data(), up.get(), kBytes);
  in->record().wait();
  std::copy(second.begin(), second.end(), up.get());
  for (int64_t at = 0; at < kBytes; at += 65536) {
    in->copy_from_host(filling.data() + at, up.get() + at, 65536);
    out->copy_to_host(down.get() + at, emptying.data() + at, 65536);
  }
  const Event sent = in->record(), received = out->record();
  received.wait();
  EXPECT_TRUE(std::equal(first.begin(), first.end(), down.get()));
  sent.wait();
  out->copy_to_host(down.get(), filling.data(), kBytes);
  out->record().wait();
  EXPECT_TRUE(std::equal(second.begin(), second.end(), down.get()));
}

TEST_P(DeviceConformance, CopiesPartsOfAnAllocation) {
  auto stream = device_->make_stream();
  const auto first = numbered(1000, 1), second = numbered(100, 2);
  auto expected = first;
  std::copy(second.begin(), second.end(), expected.begin() + 333);
  std::vector<std::byte> back(1000);
  DeviceMemory memory = device_->allocate(1000);
  stream->copy_from_host(memory.data(), first.data(), 1000);
  stream->copy_from_host(memory.data() + 333, second.data(), 100);
  stream->copy_to_host(back.data(), memory.data(), 1000);
  stream->record().wait();
  EXPECT_EQ(back, expected);
}

TEST_P(DeviceConformance, AStreamWorksInOrder) {
  auto stream = device_->make_stream();
  DeviceMemory memory = device_->allocate(64);
  std::vector<std::vector<std::byte>> sent, back(100, std::vector<std::byte>(64));
  for (int i = 0; i < 100; ++i) sent.push_back(numbered(64, i));
  for (int i = 0; i < 100; ++i) {
    stream->copy_from_host(memory.data(), sent[i].data(), 64);
    stream->copy_to_host(back[i].data(), memory.data(), 64);
  }
  stream->record().wait();
  EXPECT_EQ(back, sent);
}

TEST_P(DeviceConformance, EventsOrderStreams) {
  auto in = device_->make_stream(), out = device_->make_stream();
  for (uint32_t round = 0; round < 50; ++round) {
    const auto sent = numbered(512, round);
    std::vector<std::byte> back(512);
    DeviceMemory memory = device_->allocate(512);
    in->copy_from_host(memory.data(), sent.data(), 512);
    const Event filled = in->record();
    out->wait(filled);
    out->copy_to_host(back.data(), memory.data(), 512);
    const Event read = out->record();
    in->wait(read);  // and back: the next write of this stream comes after the read
    const auto again = numbered(512, round + 1000);
    in->copy_from_host(memory.data(), again.data(), 512);
    const Event overwritten = in->record();
    overwritten.wait();
    EXPECT_TRUE(read.done());
    EXPECT_TRUE(filled.done());
    EXPECT_EQ(back, sent) << "round " << round;
  }
}

TEST_P(DeviceConformance, EventsAreValues) {
  const Event reached;
  EXPECT_TRUE(reached.done());
  reached.wait();
  Event kept;
  const auto sent = numbered(64, 1);
  DeviceMemory memory = device_->allocate(64);
  {
    auto stream = device_->make_stream();
    stream->wait(reached);
    stream->copy_from_host(memory.data(), sent.data(), 64);
    kept = stream->record();
  }
  const Event copy = kept;  // outlives the stream
  copy.wait();
  copy.wait();
  EXPECT_TRUE(kept.done());
}

TEST_P(DeviceConformance, AnEventIsReachedOnlyAfterItsWork) {
  auto stream = device_->make_stream();
  const auto sent = numbered(1 << 16, 3);
  DeviceMemory memory = device_->allocate(1 << 16);
  std::vector<std::byte> back(1 << 16);
  for (int i = 0; i < 20; ++i) {
    std::fill(back.begin(), back.end(), std::byte{0});
    stream->copy_from_host(memory.data(), sent.data(), 1 << 16);
    stream->copy_to_host(back.data(), memory.data(), 1 << 16);
    const Event event = stream->record();
    while (!event.done()) std::this_thread::yield();
    ASSERT_EQ(back, sent);
  }
}

/// Where a device knows times at all, they follow the order of what was waited for, and the host's clock.
TEST_P(DeviceConformance, TimedEventsAreReachedInOrder) {
  const auto now_ns = [] {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  };
  constexpr int64_t kSlackNs =
      50'000'000;  // of a device's clock against the host's: another epoch is far off
  EXPECT_FALSE(Event().reached_ns());
  device_->time_events(true);
  auto in = device_->make_stream(), out = device_->make_stream();
  const auto sent = numbered(1 << 16, 1);
  std::vector<std::byte> back(1 << 16);
  DeviceMemory memory = device_->allocate(1 << 16);
  const int64_t before = now_ns();
  std::vector<Event> events = {in->record()};
  in->copy_from_host(memory.data(), sent.data(), 1 << 16);
  events.push_back(in->record());
  out->wait(events.back());
  out->copy_to_host(back.data(), memory.data(), 1 << 16);
  events.push_back(out->record());
  events.back().wait();
  const int64_t after = now_ns();
  device_->time_events(false);
  out->record().wait();  // one that nobody times
  if (!events.front().reached_ns()) {
    EXPECT_TRUE(device_->shares_host_memory()) << "a device with work of its own knows when it is done";
    return;
  }
  int64_t last = before - kSlackNs;
  for (const Event& event : events) {
    ASSERT_TRUE(event.reached_ns());
    EXPECT_GE(*event.reached_ns(), last);
    last = *event.reached_ns();
  }
  EXPECT_LE(last, after + kSlackNs);
}

TEST_P(DeviceConformance, PoisonIsLoud) {
  auto stream = device_->make_stream();
  const auto sent = numbered(4096, 1);
  DeviceMemory memory = device_->allocate(4096);
  std::vector<std::byte> back(4096);
  stream->copy_from_host(memory.data(), sent.data(), 4096);
  stream->record().wait();
  device_->poison(memory.data() + 100, 200);
  stream->copy_to_host(back.data(), memory.data(), 4096);
  stream->record().wait();
  auto expected = sent;
  std::fill_n(expected.begin() + 100, 200, std::byte{0xFF});
  // Where poisoning costs too much nothing changes; half a poisoning is wrong everywhere.
  EXPECT_TRUE(back == expected || back == sent);
}

TEST_P(DeviceConformance, NanMemoryReadsAsNanInFullLength) {
  auto stream = device_->make_stream();
  for (int64_t bytes : {int64_t{1}, int64_t{4096}, (int64_t{5} << 20) + 17}) {
    const DeviceMemory memory = device_->allocate_nan(bytes);
    EXPECT_EQ(memory.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % 4096, 0u);
    std::vector<std::byte> back(bytes);
    stream->copy_to_host(back.data(), memory.data(), bytes);
    stream->record().wait();
    EXPECT_EQ(back, std::vector<std::byte>(bytes, std::byte{0xFF}));
  }
  EXPECT_EQ(device_->allocate_nan(0).bytes(), 0);
  EXPECT_THROW((void)device_->allocate_nan(-1), DeviceError);
}

TEST_P(DeviceConformance, AnAdoptedStreamIsTheSameQueue) {
  auto own = device_->make_stream(), other = device_->make_stream();
  const auto first = numbered(1 << 16, 1), second = numbered(1 << 16, 2);
  DeviceMemory memory = device_->allocate(1 << 16), elsewhere = device_->allocate(1 << 16);
  std::vector<std::byte> back(1 << 16);
  for (int round = 0; round < 20; ++round) {
    Event read;
    {
      auto adopted = device_->adopt_stream(own->native());
      EXPECT_EQ(adopted->native(), own->native());
      own->copy_from_host(memory.data(), first.data(), 1 << 16);
      adopted->copy_to_host(back.data(), memory.data(), 1 << 16);  // in the order of both
      other->copy_from_host(elsewhere.data(), second.data(), 1 << 16);
      adopted->wait(other->record());
      read = adopted->record();
    }  // the queue goes on without it
    own->copy_to_host(back.data(), elsewhere.data(), 1 << 16);
    const Event after = own->record();
    read.wait();
    after.wait();
    EXPECT_EQ(back, second);
  }
}

TEST_P(DeviceConformance, FreedAddressesServeAgain) {
  auto stream = device_->make_stream();
  for (uint32_t i = 0; i < 200; ++i) {
    const int64_t bytes = 1 + (i * 7919) % 100'000;
    DeviceMemory memory = device_->allocate(bytes);
    const auto sent = numbered(bytes, i);
    std::vector<std::byte> back(bytes);
    stream->copy_from_host(memory.data(), sent.data(), bytes);
    stream->copy_to_host(back.data(), memory.data(), bytes);
    stream->record().wait();
    ASSERT_EQ(back, sent);
  }
}

TEST_P(DeviceConformance, StreamsOfManyThreads) {
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      auto stream = device_->make_stream();
      for (uint32_t i = 0; i < 20; ++i) {
        const auto sent = numbered(5000, 100 * t + i);
        std::vector<std::byte> back(5000);
        DeviceMemory memory = device_->allocate(5000);
        stream->copy_from_host(memory.data(), sent.data(), 5000);
        stream->copy_to_host(back.data(), memory.data(), 5000);
        stream->record().wait();
        EXPECT_EQ(back, sent);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_P(DeviceConformance, RefusesNegativeSizes) {
  auto stream = device_->make_stream();
  DeviceMemory memory = device_->allocate(64);
  std::byte host[64] = {};
  EXPECT_THROW(stream->copy_from_host(memory.data(), host, -1), DeviceError);
  EXPECT_THROW(stream->copy_to_host(host, memory.data(), -1), DeviceError);
  stream->record().wait();
}

}  // namespace
}  // namespace overspill::kernels
