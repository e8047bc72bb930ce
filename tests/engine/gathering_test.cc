// Ranks on devices that their transport reaches: shards and gradients meet there (docs/ranks.md), within the
// device's budget, without host memory, and nobody waits for another's queue. Bits: ranks_test.cc,
// divergence_test.cc, device_compute_test.cc.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/plan/plan.h"
#include "kernels/simulated_device.h"
#include "tests/engine/around_device.h"
#include "tests/engine/rank_world.h"
#include "tests/kernels/gate.h"

namespace overspill::testing {
namespace {

using engine::Placement;

/// Shards that meet on the device pass through no host memory, and from NVMe through a shard's.
TEST(GatheringOnADevice, TakesNoHostMemory) {
  const auto host_bytes = [](Placement placement, bool reaches) {
    int64_t bytes = 0;
    const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const RankOptions options{
          .placement = placement, .device = "simulated", .reaches = reaches, .prefetch_units = 0};
      const auto engine = toy_rank(options, std::move(ranks));
      if (rank == 0) bytes = engine->plan().gather_host_bytes;
      engine->close();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    return bytes;
  };
  EXPECT_EQ(host_bytes(Placement::host, true), 0);
  EXPECT_GT(host_bytes(Placement::nvme, true), 0);
  EXPECT_LT(host_bytes(Placement::nvme, true), host_bytes(Placement::nvme, false) * 6 / 10);
}

/// Gradients wait for their sums on the device where its budget has room beside the weights that are leased
/// at once, elsewhere on the host; what was planned is what is taken.
TEST(GatheringOnADevice, KeepsToTheDevicesBudget) {
  const auto plan_with = [](int64_t budget) {
    engine::Plan plan;
    const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const std::shared_ptr<kernels::SimulatedDevice> device = kernels::make_simulated_device();
      const RankOptions options{.given_device = device, .device_budget_bytes = budget, .reaches = true};
      const auto engine = toy_rank(options, std::move(ranks));
      toy_load(*engine);
      toy_step(*engine, 0, 1, rank);
      EXPECT_EQ(device->used_bytes(), engine->plan().device_bytes());
      if (rank == 0) plan = engine->plan();
      engine->close();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    return plan;
  };
  const engine::Plan roomy = plan_with(int64_t{1} << 30);
  EXPECT_GT(roomy.sums_device_bytes, 0);
  EXPECT_EQ(roomy.pool_host_bytes(), 0);
  const engine::Plan fits = plan_with(roomy.device_bytes());
  EXPECT_EQ(fits.sums_device_bytes, roomy.sums_device_bytes);
  const engine::Plan tight = plan_with(roomy.device_bytes() - roomy.sums_device_bytes / 2);
  EXPECT_LE(tight.device_bytes(), roomy.device_bytes() - roomy.sums_device_bytes / 2);
  const engine::Plan unlimited = plan_with(0);
  const engine::Plan tightest = plan_with(unlimited.gather_device_bytes);
  EXPECT_EQ(tightest.sums_device_bytes, 0);
  EXPECT_EQ(tightest.pool_host_bytes(), unlimited.gradient_pool_bytes);
  EXPECT_LT(unlimited.host_bytes(), tightest.host_bytes());
}

/// Shards live there where the budget has room beside all gathered weights and the sums, the first units
/// first.
TEST(GatheringOnADevice, KeepsToItsBudgetWithWhatLivesThere) {
  for (const int stage : {1, 2, 3}) {
    for (const int micro_batches : {1, 2}) {
      int64_t most = 0;
      const auto living_with = [&](int64_t budget) {
        int64_t living = -1;
        const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
          const std::shared_ptr<kernels::SimulatedDevice> device = kernels::make_simulated_device();
          const RankOptions options{.stage = stage,
                                    .placement = Placement::automatic,
                                    .given_device = device,
                                    .device_budget_bytes = budget,
                                    .reaches = true,
                                    .micro_batches = micro_batches};
          const auto engine = toy_rank(options, std::move(ranks));
          toy_load(*engine);
          toy_step(*engine, 0, micro_batches, rank);
          const engine::Plan& plan = engine->plan();
          EXPECT_EQ(device->used_bytes(), plan.device_bytes());
          EXPECT_LE(plan.device_bytes(), budget);
          EXPECT_LE(engine->stats().host_peak_bytes, plan.host_bytes());
          if (plan.units_on_device() == 5) {
            EXPECT_EQ(plan.states_host_bytes, 0);
            EXPECT_EQ(plan.gradients_host_bytes, 0);
          }
          if (rank == 0) {
            living = plan.units_on_device();
            most = plan.device_bytes();
          }
          engine->close();
        });
        for (const std::string& error : errors) EXPECT_EQ(error, "");
        return living;
      };
      SCOPED_TRACE(::testing::Message() << "stage " << stage << ", micro-batches " << micro_batches);
      ASSERT_EQ(living_with(int64_t{1} << 30), 5) << "all but the frozen one";
      const int64_t all = most;
      int64_t before = 5;
      for (const int part : {90, 80, 70}) {
        const int64_t living = living_with(all * part / 100);
        EXPECT_LE(living, before);
        before = living;
      }
      EXPECT_LT(before, 5);
    }
  }
}

/// In a step of units that live there weights, gradients and states stay on the devices: the host sees sums
/// of squares.
TEST(GatheringOnADevice, MovesNothingOverTheLinkOfWhatLivesThere) {
  for (const int stage : {1, 2, 3}) {
    const auto errors = on_ranks(2, [&](int, std::unique_ptr<engine::Communicator> ranks) {
      std::atomic<int64_t> copied = 0;
      const auto device =
          std::make_shared<AroundDevice>(kernels::make_simulated_device(),
                                         DeviceHooks{.before_copy = [&](int64_t bytes) { copied += bytes; }});
      const RankOptions options{
          .stage = stage, .placement = Placement::device, .given_device = device, .reaches = true};
      const auto engine = toy_rank(options, std::move(ranks));
      toy_load(*engine);
      const auto queue = device->make_stream();
      const auto units = static_cast<int>(engine->layout().units.size());
      for (int step = 0; step < 3; ++step) {
        engine->begin_pass({true, true});
        for (int u = 0; u < units; ++u) (void)engine->acquire(u, engine::Queue{queue->native()});
        for (int u = 0; u < units; ++u) {
          const engine::Unit& unit = engine->layout().units[u];
          if (!unit.trainable()) continue;
          for (size_t s = 0; s < unit.segments.size(); ++s) {
            const int64_t bytes = unit.segments[s].elements * unit.element_bytes;
            const auto gradient = std::make_shared<kernels::DeviceMemory>(device->allocate(bytes));
            device->kernels()->clear(*queue, gradient->data(), bytes);
            engine->add_gradient(u, static_cast<int32_t>(s), {gradient->data(), bytes, unit.dtype, gradient},
                                 engine::Queue{queue->native()});
          }
        }
        if (step == 0) copied = 0;  // the frozen unit has come once, and weights were loaded
        EXPECT_FALSE(engine->step(toy_groups(step)).skipped);
        engine->synchronize();
        const int64_t frozen = step == 0 ? 0 : engine->layout().units[3].shard_bytes();
        EXPECT_LE(copied, engine->plan().squares_device_bytes + frozen) << "stage " << stage;
        copied = 0;
      }
      engine->close();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

/// Whatever comes from the device or goes there does so from pinned memory.
TEST(GatheringOnADevice, CopiesPinnedMemory) {
  for (const Placement placement : {Placement::host, Placement::nvme, Placement::device}) {
    for (const bool reaches : {false, true}) {
      const auto errors = on_ranks(2, [&](int, std::unique_ptr<engine::Communicator> ranks) {
        const std::shared_ptr<kernels::SimulatedDevice> device = kernels::make_simulated_device();
        const RankOptions options{.placement = placement, .given_device = device, .reaches = reaches};
        const auto engine = toy_rank(options, std::move(ranks));
        const auto queue = device->make_stream();
        engine->begin_pass({true, true});
        for (int u = 0; u < static_cast<int>(engine->layout().units.size()); ++u) {
          (void)engine->acquire(u, engine::Queue{queue->native()});
          const engine::Unit& unit = engine->layout().units[u];
          for (size_t s = 0; unit.trainable() && s < unit.segments.size(); ++s) {
            const int64_t bytes = unit.segments[s].elements * unit.element_bytes;
            const auto gradient = std::make_shared<kernels::DeviceMemory>(device->allocate(bytes));
            engine->add_gradient(u, static_cast<int32_t>(s), {gradient->data(), bytes, unit.dtype, gradient},
                                 engine::Queue{queue->native()});
          }
        }
        EXPECT_TRUE(engine->step(toy_groups(0)).skipped) << "NaN, as new memory reads";
        engine->close();
        EXPECT_EQ(device->unpinned_copies(), 0) << static_cast<int>(placement) << " " << reaches;
      });
      for (const std::string& error : errors) EXPECT_EQ(error, "");
    }
  }
}

/// A rank whose room on the device is in use for long does not ask for the unit yet, so it serves the others,
/// from host memory or from what lives on its device.
void expect_to_wait_for_nobodys_queue(Placement placement) {
  const auto gate = std::make_shared<kernels::Gate>();
  std::atomic<bool> all_acquired = false;
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const RankOptions options{
        .placement = placement, .device = "simulated", .reaches = true, .prefetch_units = 0, .poison = false};
    const auto engine = toy_rank(options, std::move(ranks));
    toy_load(*engine);
    engine->begin_pass({false, false});
    const auto units = static_cast<int>(engine->layout().units.size());
    const auto queue = engine->device()->make_stream();
    if (rank == 0) queue->wait(kernels::Event(gate));
    for (int n = 0; n < 20 * units; ++n) {
      if (rank == 0) {
        (void)engine->acquire(n % units, engine::Queue{queue->native()});
      } else {
        (void)engine->acquire(n % units);
      }
    }
    if (rank == 0) all_acquired = true;
    if (rank == 1) {
      EXPECT_FALSE(all_acquired) << "there was room for all";
      gate->open();
    }
    queue->record().wait();
    engine->close();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// What the ranks hold, and what each saw of every unit right after each step.
struct Seen {
  std::vector<std::vector<std::byte>> weights;  // by rank
  std::vector<std::vector<float>> contents;

  bool operator==(const Seen&) const = default;
};

/// Steps that follow at once, without a forward between them. Where shards live on devices their updates
/// begin late: weights are looked at, and gradients of the next step come, before they have.
Seen take_steps(int stage, Placement placement) {
  constexpr int kWorld = 2;
  Seen seen{std::vector<std::vector<std::byte>>(kWorld), std::vector<std::vector<float>>(kWorld)};
  const auto errors = on_ranks(kWorld, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    std::mutex mutex;
    std::shared_ptr<kernels::Gate> gate;  // of the step
    const auto held = [&] {
      const std::lock_guard guard(mutex);
      return kernels::Event(gate);
    };
    const auto device =
        std::make_shared<AroundDevice>(kernels::make_simulated_device(), DeviceHooks{.holds_update = held});
    const auto engine = toy_rank({.stage = stage,
                                  .placement = placement,
                                  .given_device = device,
                                  .reaches = true,
                                  .prefetch_units = 4,
                                  .poison = false},
                                 std::move(ranks));
    toy_load(*engine);
    std::vector<std::thread> openers;
    for (int step = 0; step < 3; ++step) {
      {
        const std::lock_guard guard(mutex);
        gate = std::make_shared<kernels::Gate>();
      }
      for (int u = static_cast<int>(engine->layout().units.size()) - 1; u >= 0; --u) {
        const engine::Unit& unit = engine->layout().units[u];
        for (size_t s = 0; unit.trainable() && s < unit.segments.size(); ++s) {
          const std::vector<float> any(static_cast<size_t>(unit.segments[s].elements), 0.25F);
          toy_add_gradient_always(*engine, any, u, static_cast<int>(s), step, 0, rank);
        }
      }
      engine->step(toy_groups(step));
      openers.emplace_back([gate] {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        gate->open();
      });
      if (step == 1) continue;  // and at once the next one's gradients
      for (int u = 0; u < static_cast<int>(engine->layout().units.size()); ++u) {
        std::vector<std::byte> weights(static_cast<size_t>(engine->layout().units[u].bytes()));
        engine->acquire(u).copy_to_host(0, weights);
        seen.weights[rank].insert(seen.weights[rank].end(), weights.begin(), weights.end());
      }
    }
    seen.contents[rank] = toy_contents(*engine);
    for (std::thread& opener : openers) opener.join();
    engine->close();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  return seen;
}

TEST(GatheringOnADevice, KeepsWhatFollowsALateUpdateInItsOrder) {
  for (const int stage : {1, 2, 3}) {
    const Seen there = take_steps(stage, Placement::device), here = take_steps(stage, Placement::host);
    EXPECT_FALSE(there.weights[0].empty());
    EXPECT_TRUE(there == here) << "stage " << stage;
  }
}

/// Writing a state changes no weight: what lives on the device is sent meanwhile.
TEST(GatheringOnADevice, SendsWeightsWhileStatesBesideThemAreWritten) {
  std::atomic<bool> over = false;
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const RankOptions options{
        .placement = Placement::device, .device = "simulated", .reaches = true, .prefetch_units = 0};
    const auto engine = toy_rank(options, std::move(ranks));
    toy_load(*engine);
    const engine::Segment& segment = engine->layout().units[0].segments[0];
    const std::vector<float> moments(static_cast<size_t>(segment.elements), 0.5F);
    while (rank == 0 && !over) engine->write_state(0, 0, "m", moments);
    engine->begin_pass({false, false});
    for (int n = 0; rank == 1 && n < 60; ++n) (void)engine->acquire(n % 6);
    if (rank == 1) {
      over = true;
      engine->write_state(0, 0, "m", moments);
    }
    std::vector<float> seen(moments.size());
    engine->read_state(0, 0, "m", seen);
    EXPECT_EQ(seen, moments);
    engine->close();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// When rank 1 uses a unit: before rank 0 asks for it, while rank 1 reads its shard for rank 0, or once rank
/// 0 has it.
enum class When : uint8_t { before, meanwhile, after };

/// Bytes that rank 1 reads until it has used the unit.
int64_t read_by_rank_1(When when) {
  std::atomic<int> counted = 0;
  std::atomic<bool> asks = false;
  std::array<std::atomic<bool>, 2> has_it{};
  int64_t read = 0;
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto delay = std::chrono::milliseconds(when == When::meanwhile ? 60 : 0);
    const RankOptions options{.placement = Placement::nvme, .prefetch_units = 0, .store_delay = delay};
    const auto engine = toy_rank(options, std::move(ranks));
    toy_load(*engine);
    engine->begin_pass({false, false});
    engine->synchronize();
    const int64_t before = engine->stats().store.bytes_read;
    ++counted;
    while (counted < 2) std::this_thread::yield();
    const std::atomic<bool>* const awaited = rank == 0 ? (when == When::before ? &has_it[1] : nullptr)
                                             : when == When::after     ? &has_it[0]
                                             : when == When::meanwhile ? &asks
                                                                       : nullptr;
    while (awaited != nullptr && !*awaited) std::this_thread::yield();
    if (rank == 0) asks = true;
    // Rank 0 reads its own shard first, and asks for the others then.
    if (rank == 1 && when == When::meanwhile) std::this_thread::sleep_for(delay + delay / 2);
    {
      const Sets told(has_it[static_cast<size_t>(rank)]);  // also where acquire() throws
      (void)engine->acquire(1);
    }
    if (rank == 1) read = engine->stats().store.bytes_read - before;
    while (!has_it[0]) std::this_thread::yield();
    engine->close();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  return read;
}

TEST(Gathering, ReadsOnceWhatAnotherRankWantsFirst) {
  const int64_t once = read_by_rank_1(When::before);
  EXPECT_GT(once, 0);
  EXPECT_EQ(read_by_rank_1(When::meanwhile), once);
  EXPECT_EQ(read_by_rank_1(When::after), once);
}

TEST(GatheringOnADevice, WaitsForNobodysQueue) {
  expect_to_wait_for_nobodys_queue(Placement::host);
  expect_to_wait_for_nobodys_queue(Placement::device);
}

}  // namespace
}  // namespace overspill::testing
