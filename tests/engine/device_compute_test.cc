// A framework that computes on a queue of its own, ahead of the device, as PyTorch does on a CUDA stream:
// leases end, and gradients are handed over, long before the work that uses them is done. Whatever is not
// waited for reads as poison, or as another unit's weights.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/collectives/in_process.h"
#include "engine/resources.h"
#include "engine/schedule/chrome_trace.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/simulated_device.h"
#include "tests/engine/framework.h"
#include "tests/engine/rank_world.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"
#include "tests/kernels/gate.h"
#include "tests/watched.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::DeviceArray;
using engine::Engine;
using engine::Lease;
using engine::Placement;
using engine::Queue;

constexpr int kSteps = kWatched ? 5 : 10;
constexpr int64_t kThreeUnits = 92 << 10;  // what the device must have, and not what all six take
constexpr int64_t kSomeLiveThere = 400 << 10;

struct Case {
  Placement placement = Placement::host;
  std::string device = "simulated";
  int micro_batches = 1;
  bool poison = false;
  int64_t device_budget_bytes = kThreeUnits;
  bool speculate = false;
};

std::string name_of(const Case& c) {
  return fmt::format("{}_{}_micro{}{}{}{}", placement_name(c.placement), c.device, c.micro_batches,
                     c.poison ? "_poison" : "",
                     c.device_budget_bytes > kSomeLiveThere ? "_roomy"
                     : c.device_budget_bytes > kThreeUnits  ? "_some"
                                                            : "",
                     c.speculate ? "_speculate" : "");
}

Config config_of(const Case& c) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.device_budget_bytes = c.device_budget_bytes;
  config.nvme = {"/nowhere"};  // the store is in memory
  config.gradient_accumulation = c.micro_batches;
  config.max_grad_norm = c.speculate ? 1e9 : 1.0;
  config.speculate = c.speculate;
  config.prefetch_units = 2;
  config.chunk_elements = 4096;
  config.placement = c.placement;
  config.poison = c.poison;
  return config;
}

std::unique_ptr<Engine> engine_of(const Case& c, std::shared_ptr<kernels::Device>& device) {
  const Config config = config_of(c);
  engine::ResourceOptions options;
  options.device = c.device;
  options.io_backend = "memory";
  options.seed = 3;
  engine::Resources resources = make_resources(toy_units(), config, options);
  device = resources.device;
  auto engine = std::make_unique<Engine>(toy_units(), config, std::move(resources));
  toy_load(*engine);
  return engine;
}

class DeviceCompute : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceCompute, EqualsTheScalarReference) {
  const Case& c = GetParam();
  if (c.device == "cuda") {
    if (const std::string why = kernels::why_no_cuda(); !why.empty()) GTEST_SKIP() << why;
  }
  std::shared_ptr<kernels::Device> device;
  const auto engine = engine_of(c, device);
  std::shared_ptr<kernels::Device> plain_device;
  Case plain = c;
  plain.device = "host";
  plain.device_budget_bytes = 0;
  if (c.placement == Placement::device) plain.placement = Placement::host;
  const auto host = engine_of(plain, plain_device);
  if (c.device_budget_bytes == kSomeLiveThere) {
    const auto living = engine->plan().units_on_device();
    ASSERT_TRUE(living > 0 && living < 4) << living << " units live on the device";
  }
  Framework framework(*device);
  std::vector<engine::StepResult> results;
  for (int step = 0; step < kSteps; ++step) {
    const ToyStep taken = framework.step(*engine, step, c.micro_batches);
    const ToyStep expected = toy_step(*host, step, c.micro_batches, 0);
    EXPECT_EQ(taken.loss, expected.loss) << "step " << step;
    EXPECT_EQ(taken.result.norm, expected.result.norm) << "step " << step;
    results.push_back(taken.result);
  }
  expect_same_bits(toy_contents(*engine), toy_reference(kSteps, c.micro_batches, results), name_of(c));
  if (auto* simulated = dynamic_cast<kernels::SimulatedDevice*>(device.get()))
    simulated->verify_freed_memory();
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* device : {"simulated", "cuda"}) {
    for (Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
      for (int micro_batches : {1, 3}) {
        all.push_back({placement, device, micro_batches, false});
        all.push_back({placement, device, micro_batches, true});
      }
    }
    all.push_back({Placement::host, device, 1, false, 64 << 20});
    all.push_back({Placement::nvme, device, 1, true, 64 << 20});
    for (int micro_batches : {1, 3}) {
      for (bool poison : {false, true}) {
        all.push_back({Placement::device, device, micro_batches, poison, 64 << 20});
        all.push_back({Placement::device, device, micro_batches, poison, kSomeLiveThere});
      }
    }
    all.push_back({Placement::automatic, device, 1, false, kSomeLiveThere});
    all.push_back({Placement::automatic, device, 1, false, kSomeLiveThere, true});
    all.push_back({Placement::host, device, 3, false, kThreeUnits, true});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Queues, DeviceCompute, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

/// Budgets that cut a model anywhere: units on the device, held twice, at home and on NVMe, side by side.
class DrawnBudgets : public ::testing::TestWithParam<int> {};

TEST_P(DrawnBudgets, EqualTheScalarReference) {
  std::minstd_rand random(static_cast<uint32_t>(GetParam()));
  const auto draw = [&](int64_t from, int64_t to) {
    return from + static_cast<int64_t>(random()) % (to - from + 1);
  };
  Case c{.placement = Placement::automatic};
  c.micro_batches = static_cast<int>(draw(1, 3));
  c.speculate = draw(0, 2) > 0;
  c.poison = draw(0, 1) > 0;
  Config config = config_of(c);
  config.prefetch_units = draw(0, 4);
  config.threads = static_cast<int>(draw(1, 3));
  config.chunk_elements = draw(0, 1) > 0 ? 2048 : 8192;
  const bool wrong = draw(0, 2) == 0;  // guesses are
  if (wrong) config.max_grad_norm = 1;
  config.device_budget_bytes = draw(kThreeUnits, 700 << 10);
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  const engine::DeviceTraits device{.shares_host_memory = false, .updates = kernels::all_formats()};
  Config all_on_nvme = config;
  all_on_nvme.placement = Placement::nvme;
  Config all_at_home = config;
  all_at_home.speculate = false;
  const int64_t least = make_plan(layout, all_on_nvme, device).host_bytes();
  const int64_t enough = make_plan(layout, all_at_home, device).host_bytes();
  config.host_budget_bytes =
      draw(0, 1) > 0 ? draw(std::min(least, enough), enough) : draw(enough, 3 * enough);
  engine::ResourceOptions options;
  options.device = "simulated";
  options.io_backend = "memory";
  options.seed = static_cast<uint64_t>(GetParam());
  engine::Resources resources = make_resources(toy_units(), config, options);
  const std::shared_ptr<kernels::Device> simulated = resources.device;
  Engine engine(toy_units(), config, std::move(resources));
  const engine::Plan& plan = engine.plan();
  SCOPED_TRACE(fmt::format("{} units on the device, {} bytes held twice, {} on NVMe; guesses {}, {} threads",
                           plan.units_on_device(), plan.held_twice_bytes, plan.nvme_bytes(),
                           c.speculate ? (wrong ? "wrong" : "right") : "none", config.threads));
  toy_load(engine);
  Framework framework(*simulated);
  std::vector<engine::StepResult> results;
  for (int step = 0; step < kSteps; ++step)
    results.push_back(framework.step(engine, step, c.micro_batches).result);
  expect_same_bits(toy_contents(engine), toy_reference(kSteps, c.micro_batches, results),
                   fmt::format("seed {}", GetParam()));
  dynamic_cast<kernels::SimulatedDevice&>(*simulated).verify_freed_memory();
}

INSTANTIATE_TEST_SUITE_P(Seeds, DrawnBudgets, ::testing::Range(1, kWatched ? 9 : 33));

// ---- the caller

/// Nothing of it has been done when the caller is through with forward.
TEST(DeviceQueue, MayBeFarBehindItsCaller) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = engine_of({}, device);
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
  const auto host = engine_of({.device = "host"}, host_device);
  double expected = 0;
  for (int u = 0; u < units * kPasses; ++u)
    expected += toy_forward(*host, host->acquire(u % units), u % units);
  EXPECT_EQ(loss, expected);
}

/// Two queues use one lease; its memory is kept for both.
TEST(DeviceQueue, MayBeOneOfSeveral) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = engine_of({.poison = true}, device);
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
  const auto engine = engine_of({}, device);
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
  auto engine = engine_of({}, device);
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

/// A later gradient of the unit is on its way when the last one that is expected has been taken in: a guess
/// made then would lack it, and nobody would take the guess back.
TEST(DeviceGradient, ThatIsOnItsWayIsInNoGuess) {
  const Case guessing{.placement = Placement::host, .speculate = true};
  std::shared_ptr<kernels::Device> device, host_device;
  const auto engine = engine_of(guessing, device);
  Case plain = guessing;
  plain.device = "host";
  plain.device_budget_bytes = 0;
  const auto host = engine_of(plain, host_device);
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

// ---- what the device's own events tell

/// Every copy and every lease's work, each unit's work after the copy that it needs, gradients after that.
TEST(DeviceTrace, IsTrueToWhatWasWaitedFor) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = engine_of({}, device);
  Framework framework(*device);
  framework.step(*engine, 0, 1);
  EXPECT_TRUE(engine->take_device_spans().empty()) << "nobody asked for it";
  engine->record_journal(true);
  framework.step(*engine, 1, 1);
  engine->record_journal(false);
  const auto entries = engine->take_journal();
  const auto spans = engine->take_device_spans();
  EXPECT_TRUE(engine->take_device_spans().empty());

  using Kind = engine::DeviceSpan::Kind;
  const auto units = static_cast<int>(engine->layout().units.size());
  for (int u = 0; u < units; ++u) {
    std::vector<engine::DeviceSpan> of[3];
    for (const engine::DeviceSpan& span : spans) {
      EXPECT_LE(span.begin_ns, span.end_ns);
      if (span.unit == u) of[static_cast<int>(span.kind)].push_back(span);
    }
    const auto& [up, compute, down] = of;
    ASSERT_EQ(compute.size(), 2u) << "forward and backward of unit " << u;
    EXPECT_EQ(compute[0].queue, framework.queue().native);
    if (engine->layout().units[u].trainable()) {
      ASSERT_FALSE(up.empty()) << "unit " << u << " was updated";
    }
    if (!up.empty()) {
      EXPECT_GE(compute[0].end_ns, up[0].end_ns) << "unit " << u;
    }
    size_t given = 0;
    for (size_t s = 0; s < engine->layout().units[u].segments.size(); ++s) {
      if (engine->layout().units[u].trainable() && !toy_skips(u, static_cast<int>(s), 1, 0)) ++given;
    }
    EXPECT_EQ(down.size(), given) << "unit " << u << ": each of its gradients, whole";
    for (const engine::DeviceSpan& copy : down) EXPECT_GE(copy.end_ns, compute[1].begin_ns);
  }

  std::ostringstream out;
  engine::write_chrome_trace(out, engine->layout(), entries, spans);
  const auto events = nlohmann::json::parse(out.str())["traceEvents"];
  std::map<int, std::string> tracks;
  std::map<std::string, size_t> shown;
  for (const auto& e : events) {
    if (e["ph"] == "M") tracks[e["tid"]] = e["args"]["name"];
  }
  for (const auto& e : events) {
    if (e["ph"] == "X") ++shown[tracks[e["tid"]]];
  }
  const auto count = [&](Kind kind) {
    return static_cast<size_t>(
        std::count_if(spans.begin(), spans.end(), [&](const auto& span) { return span.kind == kind; }));
  };
  EXPECT_EQ(shown["device: copies up"], count(Kind::copy_up));
  EXPECT_EQ(shown["device: copies down"], count(Kind::copy_down));
  EXPECT_EQ(shown["device: computes (0)"], count(Kind::compute));
}

// ---- gradients

TEST(DeviceGradient, ThatDoesNotFitIsRefusedAtOnce) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = engine_of({}, device);
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
  const auto engine = engine_of({}, device);
  auto queue = device->make_stream();
  const auto host = std::make_shared<std::vector<std::byte>>(97 * 64 * 2);
  engine->add_gradient(0, 0, DeviceArray{host->data(), std::ssize(*host), "BF16", host},
                       Queue{queue->native()});
  EXPECT_THROW(engine->step(toy_groups(0)), engine::EngineFailed);
}

/// It is let go, and its memory may be given to somebody else, once it has been taken in; and not before.
TEST(DeviceGradient, IsKeptUntilItIsTakenIn) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = engine_of({}, device);
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
  const auto engine = engine_of({.micro_batches = 2}, device);
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
  const auto engine = engine_of({}, device);
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

// ---- several ranks

/// Whether shards and gradients meet on the device or on the host.
class TwoRanks : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Meeting, TwoRanks, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "on_the_device" : "on_the_host"; });

TEST_P(TwoRanks, EqualTheReferenceAtEveryStage) {
  for (int stage : {0, 1, 2, 3}) {
    for (int micro_batches : {1, 2}) {
      std::vector<engine::StepResult> results;
      std::vector<float> contents;
      const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
        RankOptions options;
        options.stage = stage;
        options.given_device = kernels::make_simulated_device();
        options.micro_batches = micro_batches;
        options.reaches = GetParam();
        const auto engine = toy_rank(options, std::move(ranks));
        EXPECT_EQ(engine->plan().sums_device_bytes > 0, GetParam() && stage >= 2 && micro_batches == 1);
        toy_load(*engine);
        Framework framework(*options.given_device);
        std::vector<engine::StepResult> own;
        for (int step = 0; step < kSteps; ++step)
          own.push_back(framework.step(*engine, step, micro_batches, rank).result);
        const auto all = toy_contents(*engine);
        if (rank == 0) {
          results = own;
          contents = all;
        }
      });
      EXPECT_EQ(errors, std::vector<std::string>(2));
      expect_same_bits(contents, toy_reference(kSteps, micro_batches, results, 2),
                       fmt::format("stage {}, {} micro-batches", stage, micro_batches));
    }
  }
}

}  // namespace
}  // namespace overspill::testing
