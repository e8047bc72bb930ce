// Ranks on devices that their transport reaches: shards and gradients meet there (docs/ranks.md), within the
// device's budget, without host memory, and nobody waits for another's queue. Bits: ranks_test.cc,
// divergence_test.cc, device_compute_test.cc.
#include <gtest/gtest.h>

#include <atomic>

#include "kernels/simulated_device.h"
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

/// Whatever comes from the device or goes there does so from pinned memory.
TEST(GatheringOnADevice, CopiesPinnedMemory) {
  for (const Placement placement : {Placement::host, Placement::nvme}) {
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

/// A rank whose room on the device is in use for long does not ask for the unit yet, so it serves the others.
TEST(GatheringOnADevice, WaitsForNobodysQueue) {
  const auto gate = std::make_shared<kernels::Gate>();
  std::atomic<bool> all_acquired = false;
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const RankOptions options{.device = "simulated", .reaches = true, .prefetch_units = 0, .poison = false};
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

}  // namespace
}  // namespace overspill::testing
