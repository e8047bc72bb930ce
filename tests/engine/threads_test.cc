// What may be called from several threads at once (engine/engine.h), for a sanitizer to watch.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "engine/plan/predict.h"
#include "engine/resources.h"
#include "tests/engine/rank_world.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"
#include "tests/watched.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Placement;

constexpr int kUnits = 6;
constexpr int kSteps = 4;

struct Case {
  Placement placement;
  std::string device;
};

std::unique_ptr<Engine> engine_of(const Case& c) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.device_budget_bytes = 400 << 10;
  config.nvme = {"/nowhere"};  // the store is in memory
  config.threads = 2;
  config.chunk_elements = 4096;
  config.gradient_accumulation = 2;
  config.prefetch_units = 2;
  config.placement = c.placement;
  auto engine = std::make_unique<Engine>(toy_units(), config,
                                         make_resources(toy_units(), config, {c.device, "memory", 1}));
  toy_load(*engine);
  return engine;
}

/// Gradients of one segment, from the weights that a lease has, twice.
void bring(Engine& engine, int unit, int segment, int step) {
  for (int micro = 0; micro < 2; ++micro) {
    const engine::Lease lease = engine.acquire(unit);
    toy_add_gradient_always(engine, toy_leased(engine, lease, unit, segment), unit, segment, step, micro, 0);
  }
}

template <class Each>
void for_each_segment(Engine& engine, Each each) {
  for (int u = 0; u < kUnits; ++u) {
    const engine::Unit& unit = engine.layout().units[u];
    for (int s = 0; unit.trainable() && s < static_cast<int>(unit.segments.size()); ++s) each(u, s);
  }
}

void look(Engine& engine) {
  (void)engine.stats();
  (void)engine.report();
  (void)engine.figures();
  (void)engine.predict();
  (void)engine.predict_budgets(std::vector<int64_t>{32 << 20});
  (void)engine.plan().text();
}

class Threads : public ::testing::TestWithParam<Case> {};

TEST_P(Threads, BringGradientsSideBySideWhileAnotherLooks) {
  const auto alone = engine_of(GetParam());
  for (int step = 0; step < kSteps; ++step) {
    alone->begin_pass({true, true});
    for_each_segment(*alone, [&](int u, int s) { bring(*alone, u, s, step); });
    alone->step(toy_groups(step));
  }
  const auto together = engine_of(GetParam());
  std::atomic<bool> over = false;
  std::thread looks([&] {
    while (!over) look(*together);
  });
  for (int step = 0; step < kSteps; ++step) {
    together->record_journal(step == 1);
    std::vector<std::thread> threads;
    for_each_segment(*together, [&](int u, int s) {
      threads.emplace_back([&, u, s] {
        together->begin_pass({true, true});
        together->begin_backward();
        bring(*together, u, s, step);
        EXPECT_TRUE(together->has_gradient(u, s));
        EXPECT_EQ(together->generation(u), alone->generation(u) - kSteps + step);
        (void)together->resident_now(u);
        (void)together->take_journal();
        (void)together->take_device_spans();
      });
    });
    for (std::thread& thread : threads) thread.join();
    together->step(toy_groups(step));
  }
  expect_same_bits(toy_contents(*together), toy_contents(*alone), "the contents");
  together->close();  // looks may go on
  over = true;
  looks.join();
}

INSTANTIATE_TEST_SUITE_P(Places, Threads,
                         ::testing::Values(Case{Placement::host, "host"}, Case{Placement::nvme, "host"},
                                           Case{Placement::host, "simulated"},
                                           Case{Placement::nvme, "simulated"}),
                         [](const auto& info) {
                           return std::string(placement_name(info.param.placement)) + "_" + info.param.device;
                         });

/// One lease, and a queue of each thread's own.
TEST(ThreadsOfALease, EachUseItOnTheirQueues) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.device_budget_bytes = 400 << 10;
  config.nvme = {"/nowhere"};  // the store is in memory
  config.chunk_elements = 4096;
  config.placement = Placement::host;
  Engine engine(toy_units(), config, make_resources(toy_units(), config, {"simulated", "memory", 1}));
  toy_load(engine);
  constexpr int kThreads = 8;
  std::vector<std::unique_ptr<kernels::Stream>> queues;
  for (int t = 0; t < kThreads; ++t) queues.push_back(engine.device()->make_stream());
  for (int round = 0; round < (kWatched ? 3 : 20); ++round) {
    engine::Lease lease = engine.acquire(1);
    std::vector<std::thread> threads;
    std::barrier begin(kThreads);
    for (const auto& queue : queues) {
      threads.emplace_back([&] {
        begin.arrive_and_wait();
        for (int use = 0; use < 3; ++use) lease.use_on({queue->native()});
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

/// Two callers of one rank wait for two units that others have to send: neither is forgotten when the other
/// has got what it waited for.
TEST(ThreadsOfARank, AreEachServedWhatTheyWaitFor) {
  ::alarm(120);  // a hang
  RankOptions options;
  options.placement = Placement::nvme;
  options.prefetch_units = 0;
  options.poison = false;
  std::barrier both(2);
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank(options, std::move(ranks));
    for (int round = 0; round < (kWatched ? 3 : 10); ++round) {
      toy_load(*engine);  // what was gathered before is of no use any more
      std::vector<std::thread> threads;
      for (int u = 0; u < kUnits && rank == 0; ++u)
        threads.emplace_back([&, u] { (void)engine->acquire(u); });
      for (std::thread& thread : threads) thread.join();
      both.arrive_and_wait();
    }
    engine->close();
  });
  ::alarm(0);
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

}  // namespace
}  // namespace overspill::testing
