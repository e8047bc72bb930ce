// One call for a tensor of any size: the same bytes whatever the number of threads and the size of pieces.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "cpu_optim/executor.h"
#include "cpu_optim/numa.h"
#include "cpu_optim/update.h"
#include "tests/cpu_optim/update_cases.h"

namespace overspill::optim {
namespace {

std::vector<std::byte*> pointers_of(Bytes& bytes) {
  std::vector<std::byte*> pointers;
  for (auto& component : bytes.components) pointers.push_back(component.data());
  return pointers;
}

TEST(ParallelUpdate, ThreadsDoNotChangeABit) {
  int64_t cases = 0;
  const std::vector<int64_t> sizes =
      kFewer ? std::vector<int64_t>{0, 1, 1000} : std::vector<int64_t>{0, 1, 63, 64, 129, 1000, 600'001};
  for (const int threads : {1, 2, 3, 7}) {
    const auto executor = make_executor(threads);
    for (const Format format : kFormats) {
      for (const Hyper& hyper : {Hyper(AdamConfig{.weight_decay = 0.1}), Hyper(LionConfig{})}) {
        for (const int64_t n : sizes) {
          const Step step{.hyper = hyper, .index = 6400};
          const Bytes start = random_bytes(optimizer_of(hyper), format, Element::bf16, n, 3);
          const Bytes want = expected(start, step, {0, n});
          Bytes got = start;
          const auto pointers = pointers_of(got);
          parallel_update(*executor, format,
                          {.components = pointers, .elements = n, .index = step.index, .seed = step.seed},
                          {got.gradient.data(), Element::bf16},
                          make_factors(hyper, step.step, step.grad_scale));
          ASSERT_EQ(difference(got, want), "") << name(format) << " n " << n << " threads " << threads;
          ++cases;
        }
      }
    }
  }
  std::printf("%lld cases\n", static_cast<long long>(cases));
}

// A machine of three nodes that hands out memory page by page.
class ThreeNodes final : public Nodes {
 public:
  int count() const override { return 3; }
  int of(const void* address) const override {
    return static_cast<int>(reinterpret_cast<uintptr_t>(address) / 4096 % 3);
  }
  void run_on(int node, const std::function<void()>& work) const override {
    ++runs[static_cast<size_t>(node)];
    work();
  }
  mutable std::array<std::atomic<int>, 3> runs{};
};

TEST(ParallelUpdate, NodesDoNotChangeABitAndEachHasWorkers) {
  const int64_t n = kFewer ? 5'000 : 1'500'001;
  for (const int threads : {1, 2, 5}) {
    const auto executor = make_executor(threads);
    for (const Format format : kFormats) {
      const Step step{.hyper = AdamConfig{.weight_decay = 0.1}};
      const Bytes start = random_bytes(optimizer_of(step.hyper), format, Element::bf16, n, 3);
      Bytes got = start;
      const auto pointers = pointers_of(got);
      const ThreeNodes nodes;
      parallel_update(*executor, format, {.components = pointers, .elements = n, .seed = step.seed},
                      {got.gradient.data(), Element::bf16},
                      make_factors(step.hyper, step.step, step.grad_scale), nodes);
      ASSERT_EQ(difference(got, expected(start, step, {0, n})), "") << name(format) << " threads " << threads;
      for (int node = 0; node < std::min(3, threads); ++node)
        EXPECT_GE(nodes.runs[static_cast<size_t>(node)], 1) << "node " << node << " threads " << threads;
    }
  }
}

TEST(Nodes, ThisMachineHasThemAndAThreadComesBackUnbound) {
  const Nodes& nodes = machine_nodes();
  ASSERT_GE(nodes.count(), 1);
  std::printf("%d nodes\n", nodes.count());
  const std::vector<char> memory(1 << 20, 'x');
  EXPECT_GE(nodes.of(memory.data()), 0);
  EXPECT_LT(nodes.of(memory.data()), nodes.count());
  cpu_set_t one, before, inside, after;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  if (sched_setaffinity(0, sizeof(one), &one) != 0) GTEST_SKIP() << "threads may not be bound here";
  for (int node = 0; node < nodes.count(); ++node) {
    bool ran = false;
    nodes.run_on(node, [&] { ran = sched_getaffinity(0, sizeof(inside), &inside) == 0; });
    EXPECT_TRUE(ran);
    EXPECT_TRUE(CPU_EQUAL(&inside, &one)) << "a thread was bound to more than it had";
    ASSERT_EQ(sched_getaffinity(0, sizeof(after), &after), 0);
    EXPECT_TRUE(CPU_EQUAL(&after, &one));
  }
  sched_setaffinity(0, sizeof(before), &before);
}

// A unit cut into chunks, each with components of its own, is the unit in one piece.
TEST(ParallelUpdate, ChunksDoNotChangeABit) {
  constexpr int64_t kCount = 1000, kChunk = 256;
  for (const Format format : kFormats) {
    const Step step{.hyper = AdamConfig{}, .seed = 77};
    Bytes whole(optimizer_of(step.hyper), format, Element::fp32, kCount);
    std::vector<Bytes> chunks;
    for (int64_t at = 0; at < kCount; at += kChunk)
      chunks.emplace_back(whole.optimizer, format, Element::fp32, std::min(kChunk, kCount - at));
    const auto chunk_of = [&](int64_t i) -> Bytes& { return chunks[static_cast<size_t>(i / kChunk)]; };
    for (int64_t i = 0; i < kCount; ++i) {
      const float w = 0.01f * static_cast<float>(i % 37 - 18);
      whole.set_weight(i, w), chunk_of(i).set_weight(i % kChunk, w);
    }
    for (int64_t number = 1; number <= 20; ++number) {
      for (int64_t i = 0; i < kCount; ++i) {
        const float g = 0.01f * static_cast<float>((i * number) % 23 - 11);
        whole.set_gradient(i, g), chunk_of(i).set_gradient(i % kChunk, g);
      }
      const auto step_of = [&](Bytes& b, int64_t index) {
        const auto pointers = pointers_of(b);
        update(format, {.components = pointers, .elements = b.elements, .index = index, .seed = step.seed},
               {b.gradient.data(), Element::fp32}, {0, b.elements}, make_factors(step.hyper, number, 1.0));
      };
      step_of(whole, 0);
      for (size_t c = 0; c < chunks.size(); ++c) step_of(chunks[c], static_cast<int64_t>(c) * kChunk);
    }
    for (int64_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(whole.weight(i), chunk_of(i).weight(i % kChunk)) << name(format) << " " << i;
      for (int k = 0; k < 2; ++k) ASSERT_EQ(whole.state(k, i), chunk_of(i).state(k, i % kChunk)) << i;
    }
  }
}

}  // namespace
}  // namespace overspill::optim
