// Leases where queues have nothing to say, and where the device fails: their end never throws, and none is
// lost.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "kernels/simulated_device.h"
#include "tests/engine/around_device.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Lease;
using engine::Placement;

constexpr int kUnits = 6;

Config config_of() {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.device_budget_bytes = 92 << 10;  // three of six units
  config.nvme = {"/nowhere"};             // the store is in memory
  config.threads = 2;
  config.chunk_elements = 4096;
  config.prefetch_units = 2;
  return config;
}

/// On a device that shares the host's memory a queue's work is done when it is submitted.
TEST(LeaseEnd, OfAQueueOnTheHostLeavesNothingToWaitFor) {
  Config config = config_of();
  config.placement = Placement::nvme;
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  for (config.host_budget_bytes = 64 << 10;; config.host_budget_bytes += 4 << 10) {
    try {
      (void)make_plan(layout, config, {});
      break;
    } catch (const engine::BudgetError&) {
    }
  }
  Engine engine(toy_units(), config, make_resources(toy_units(), config, {"host", "memory", 1}));
  toy_load(engine);
  for (int round = 0; round < 3; ++round) {  // units make room for one another
    for (int u = 0; u < kUnits; ++u) {
      const Lease queued = engine.acquire(u, engine::Queue{});
      const Lease plain = engine.acquire(u);
      EXPECT_EQ(std::memcmp(queued.data(), plain.data(), static_cast<size_t>(plain.bytes())), 0);
    }
  }
}

class OnAFailingDevice : public ::testing::Test {
 protected:
  OnAFailingDevice() {
    const Config config = config_of();
    engine::Resources resources = make_resources(toy_units(), config, {"simulated", "memory", 1});
    device_ = std::make_shared<AroundDevice>(
        kernels::make_simulated_device({}),
        DeviceHooks{.before_wait = [this](bool) { fail_if(waits_fail_, "a wait failed"); },
                    .before_record = [this] { fail_if(records_fail_, "no event"); }});
    resources.device = device_;
    engine_.emplace(toy_units(), config, std::move(resources));
    toy_load(*engine_);
  }

  static void fail_if(bool fails, const char* why) {
    if (fails) throw kernels::DeviceError(why);
  }

  int64_t elements_of(int unit, int segment) const {
    return engine_->layout().units[unit].segments[segment].elements;
  }

  std::atomic<bool> waits_fail_ = false;
  std::atomic<bool> records_fail_ = false;
  std::shared_ptr<kernels::Device> device_;
  std::optional<Engine> engine_;
};

TEST_F(OnAFailingDevice, TheEndOfALeaseIsToldAtTheNextCall) {
  auto queue = device_->make_stream();
  {
    const Lease lease = engine_->acquire(0, {queue->native()});
    records_fail_ = true;
  }
  records_fail_ = false;
  std::string message;
  try {
    (void)engine_->acquire(1);
  } catch (const engine::EngineFailed& error) {
    message = error.what();
  }
  for (const char* part : {"ending a lease of embed failed", "no event"})
    EXPECT_NE(message.find(part), std::string::npos) << part << " is missing in: " << message;
}

/// A lease that was lost would keep its unit's room for ever.
TEST_F(OnAFailingDevice, AnAcquireThatThrowsLeasesNothing) {
  for (int u = 0; u < kUnits; ++u) {
    waits_fail_ = true;
    EXPECT_THROW((void)engine_->acquire(u), kernels::DeviceError) << u;
    waits_fail_ = false;
  }
  for (int u = 0; u < kUnits; ++u) EXPECT_NO_THROW((void)engine_->acquire(u)) << u;
}

/// By then it has counted the step, so no caller may take it for one that changed nothing.
TEST_F(OnAFailingDevice, AStepThatCannotTakeOldWeightsBackFailsTheEngine) {
  toy_step(*engine_, 0, 1, 0);
  for (int u = 0; u < kUnits; ++u) (void)engine_->acquire(u);  // the device has copies of these weights
  toy_add_gradient_always(*engine_, std::vector<float>(static_cast<size_t>(elements_of(0, 0)), 0.5F), 0, 0, 1,
                          0, 0);
  std::string message;
  waits_fail_ = true;
  try {
    engine_->step(toy_groups(1));
  } catch (const engine::EngineFailed& error) {
    message = error.what();
  }
  waits_fail_ = false;
  for (const char* part : {"step 2", "a wait failed"})
    EXPECT_NE(message.find(part), std::string::npos) << part << " is missing in: " << message;
  EXPECT_THROW((void)engine_->acquire(0), engine::EngineFailed);
}

}  // namespace
}  // namespace overspill::testing
