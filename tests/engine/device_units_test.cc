// Units that live on the device: which ones the plan puts there, and that nothing that waits for their
// update, or that their update has to wait for, goes by timing. Their bits are exactness_test.cc's and
// device_compute_test.cc's.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optim/elements.h"
#include "engine/memory/budget.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "kernels/simulated_device.h"
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
using engine::Plan;
using engine::Queue;

constexpr int64_t kMiB = 1 << 20;
const engine::DeviceTraits kUpdates{.shares_host_memory = false, .updates = kernels::all_formats()};

// ---- the plan

std::vector<engine::UnitSpec> layers(int count, engine::UnitFormat format = optim::Format::exact) {
  std::vector<engine::UnitSpec> units;
  for (int i = 0; i < count; ++i) {
    const std::string name = fmt::format("layer{}", i);
    units.push_back({name, format, "BF16", {{name + ".weight", {1024, 1024}, 0, {}}}});  // 2 MiB of weights
  }
  return units;
}

Plan plan_of(const std::vector<engine::UnitSpec>& units, int64_t device_mib,
             Placement placement = Placement::automatic, int world = 1, int64_t micro_batches = 1) {
  Config config;
  config.host_budget_bytes = int64_t{1} << 30;
  config.device_budget_bytes = device_mib * kMiB;
  config.placement = placement;
  config.gradient_accumulation = micro_batches;
  return make_plan(engine::make_layout(units, config.chunk_elements, 0, world), config, kUpdates);
}

TEST(UnitsOnTheDevice, AreTheFirstThatFitBesideAllOtherWeights) {
  EXPECT_EQ(plan_of(layers(8), 0).units_on_device(), 0) << "nothing was given";
  EXPECT_EQ(plan_of(layers(8), 10).units_on_device(), 0) << "not even all weights fit";
  EXPECT_EQ(plan_of(layers(8), 18).units_on_device(), 0) << "they do, and nothing else";
  const Plan two = plan_of(layers(8), 44);  // 14 MiB each in place of 2, and 2 MiB of scratch
  EXPECT_EQ(two.on_device, (std::vector<bool>{true, true, false, false, false, false, false, false}));
  EXPECT_EQ(two.gather_device_bytes, 6 * (2 * kMiB + 4096));
  EXPECT_GE(two.units_device_bytes, 2 * 14 * kMiB);
  EXPECT_LE(two.device_bytes(), 44 * kMiB);
  EXPECT_EQ(two.weights_host_bytes, 6 * 2 * kMiB) << "nothing of them is left on the host";
  EXPECT_EQ(two.states_host_bytes, 6 * 10 * kMiB);
  EXPECT_EQ(two.gradients_host_bytes, 6 * 2 * kMiB);
  EXPECT_NE(two.text().find("2 of 8 units live there"), std::string::npos) << two.text();
  const Plan all = plan_of(layers(8), 200);
  EXPECT_EQ(all.units_on_device(), 8);
  EXPECT_EQ(all.gather_device_bytes, 0);
  EXPECT_LT(all.host_bytes(), 16 * kMiB) << "what gradients and looks from outside pass through";
}

TEST(UnitsOnTheDevice, KeepToEveryBudget) {
  int64_t before = 0;
  for (int64_t mib = 7; mib < 160; ++mib) {
    const Plan plan = plan_of(layers(10), mib);
    EXPECT_LE(plan.device_bytes(), mib * kMiB);
    EXPECT_GE(plan.units_on_device(), before) << mib;
    before = plan.units_on_device();
  }
  EXPECT_EQ(before, 10);
}

TEST(UnitsOnTheDevice, CountInTheSmallestHostBudgetThatIsNamed) {
  Config config;
  config.host_budget_bytes = 1 << 20;
  config.device_budget_bytes = 44 * kMiB;
  const auto layout = engine::make_layout(layers(8), config.chunk_elements, 0, 1);
  int64_t named = 0;
  try {
    make_plan(layout, config, kUpdates);
    FAIL() << "one MiB cannot be enough";
  } catch (const engine::BudgetError& error) {
    const std::string text = error.what();
    named = std::stoll(text.substr(text.find('(', text.find("smallest budget")) + 1));
  }
  config.host_budget_bytes = named;
  EXPECT_EQ(make_plan(layout, config, kUpdates).units_on_device(), 2);
  config.host_budget_bytes = named - 1;
  EXPECT_THROW(make_plan(layout, config, kUpdates), engine::BudgetError);
}

/// What is short on the host has room on the device, where the arena otherwise keeps weights that are not in
/// use.
TEST(UnitsOnTheDevice, RelieveAHostThatCannotHoldTheRest) {
  for (const int64_t micro_batches : {1, 2}) {
    for (const bool with_nvme : {false, true}) {
      Config config;
      config.host_budget_bytes = int64_t{1} << 30;
      config.device_budget_bytes = 60 * kMiB;
      config.prefetch_units = 0;
      config.gradient_accumulation = micro_batches;
      if (with_nvme) config.nvme = {"/nowhere"};
      const auto layout = engine::make_layout(layers(30), config.chunk_elements, 0, 1);
      const auto with_less = [&](int64_t less) {
        config.host_budget_bytes -= less;
        return make_plan(layout, config, kUpdates);
      };
      const Plan roomy = with_less(0);
      EXPECT_EQ(roomy.units_on_device(), 0) << "it keeps the weights of almost all units";
      config.host_budget_bytes = roomy.host_bytes();
      EXPECT_EQ(with_less(0).units_on_device(), 0);
      for (int64_t living = 1; living <= 3; ++living) {
        const Plan plan = with_less(living == 1 ? 1 : 16 * kMiB);
        EXPECT_EQ(plan.units_on_device(), living);
        EXPECT_LE(plan.device_bytes(), config.device_budget_bytes);
        EXPECT_GE(plan.gather_device_bytes, 3 * 2 * kMiB) << "what is used together";
        EXPECT_EQ(plan.nvme_bytes(), 0);
      }
      if (with_nvme) {
        EXPECT_GT(with_less(64 * kMiB).nvme_bytes(), 0);
      } else {
        EXPECT_THROW(with_less(64 * kMiB), engine::BudgetError);
      }
    }
  }
}

TEST(UnitsOnTheDevice, TakeMoreWhereGradientsAreAddedUp) {
  EXPECT_EQ(plan_of(layers(4), 60).units_on_device(), 4);
  EXPECT_EQ(plan_of(layers(4), 60, Placement::automatic, 1, 2).units_on_device(), 3) << "16 bytes, not 14";
}

TEST(UnitsOnTheDevice, AreWhatItsKernelsUpdate) {
  for (const optim::Format format :
       {optim::Format::exact, optim::Format::compact, optim::Format::eight_bit}) {
    for (int i = 0; i < optim::kOptimizerCount; ++i) {
      auto units = layers(4, format);
      for (engine::UnitSpec& unit : units) unit.optimizer = optim::Optimizer{static_cast<uint8_t>(i)};
      EXPECT_EQ(plan_of(units, 200).units_on_device(), 4) << optim::name(units[0].optimizer);
    }
  }
  EXPECT_EQ(plan_of(layers(4, engine::kFrozen), 200).units_on_device(), 0) << "frozen ones have no states";
  EXPECT_EQ(plan_of(layers(4, optim::Format::compact), 43).units_on_device(), 4) << "10 bytes, not 14";
  EXPECT_EQ(plan_of(layers(4), 43).units_on_device(), 2);
  EXPECT_EQ(plan_of(layers(4), 200, Placement::host).units_on_device(), 0) << "forced elsewhere";
  EXPECT_EQ(plan_of(layers(4), 0, Placement::device).units_on_device(), 4) << "forced there";
  Config config;
  config.host_budget_bytes = 1 << 30;
  config.device_budget_bytes = 200 * kMiB;
  const auto layout = engine::make_layout(layers(4), config.chunk_elements, 0, 1);
  EXPECT_EQ(make_plan(layout, config, {.shares_host_memory = false}).units_on_device(), 0) << "no kernels";
  engine::DeviceTraits others{.shares_host_memory = false};
  others.updates.set(static_cast<size_t>(optim::Format::compact));
  EXPECT_EQ(make_plan(layout, config, others).units_on_device(), 0) << "kernels that know another format";
  EXPECT_EQ(make_plan(layout, config, {}).units_on_device(), 0) << "the CPU";
}

/// Where their transport reaches the device, and the order of additions is the engine's; not at stage 0.
TEST(UnitsOnTheDevice, AreShardsOfSeveralRanks) {
  engine::DeviceTraits reached = kUpdates;
  reached.gathers = true;
  Config config;
  config.host_budget_bytes = int64_t{1} << 30;
  const auto plan_at = [&](int stage, int64_t mib, const engine::DeviceTraits& traits) {
    config.device_budget_bytes = mib * kMiB;
    return make_plan(engine::make_layout(layers(8), config.chunk_elements, 0, 2, stage), config, traits);
  };
  for (const int stage : {1, 2, 3}) {
    EXPECT_EQ(plan_at(stage, 400, kUpdates).units_on_device(), 0) << "shards meet on the host";
    const Plan all = plan_at(stage, 400, reached);
    EXPECT_EQ(all.units_on_device(), 8);
    EXPECT_EQ(all.states_host_bytes + all.weights_host_bytes + all.gradients_host_bytes, 0);
    const int64_t gradients = stage == 1 ? 2 * kMiB : kMiB;  // a unit's, or its shard's
    EXPECT_GE(all.units_device_bytes, 8 * (6 * kMiB + gradients)) << "of 12 bytes a half";
    EXPECT_LT(all.units_device_bytes, 8 * (6 * kMiB + gradients) + kMiB);
    EXPECT_GE(all.gather_device_bytes, 8 * 2 * kMiB) << "and all weights";
    int64_t before = 0;
    for (int64_t mib = 17; mib < 120; mib += 3) {
      const Plan plan = plan_at(stage, mib, reached);
      EXPECT_LE(plan.device_bytes(), mib * kMiB);
      EXPECT_GE(plan.units_on_device(), before) << mib;
      before = plan.units_on_device();
    }
    EXPECT_EQ(before, 8);
  }
  EXPECT_EQ(plan_at(0, 400, reached).units_on_device(), 0) << "sums go to all ranks, by way of the host";
  config.library_sums = true;
  EXPECT_EQ(plan_at(3, 400, reached).units_on_device(), 0) << "the transport sums host memory";
}

// ---- the engine

struct Made {
  std::shared_ptr<kernels::Device> device;
  std::unique_ptr<Engine> engine;
};

Config config_of(Placement placement) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.device_budget_bytes = 64 << 20;
  config.nvme = {"/nowhere"};  // the store is in memory
  config.max_grad_norm = 1.0;
  config.chunk_elements = 4096;
  config.placement = placement;
  return config;
}

/// Without weights.
Made make_empty(const Config& config, const std::string& device = "simulated", const ToyKind& kind = {}) {
  engine::ResourceOptions options;
  options.device = device;
  options.io_backend = "memory";
  options.seed = 5;
  engine::Resources resources = make_resources(toy_units(kind), config, options);
  Made made{resources.device, nullptr};
  made.engine = std::make_unique<Engine>(toy_units(kind), config, std::move(resources));
  return made;
}

Made make(const Config& config, const std::string& device = "simulated", const ToyKind& kind = {}) {
  Made made = make_empty(config, device, kind);
  toy_load(*made.engine);
  return made;
}

TEST(UnitsOnTheDevice, AreZeroUntilWeightsAreLoaded) {
  const Made made = make_empty(config_of(Placement::device));
  const engine::Unit& unit = made.engine->layout().units[0];
  std::vector<std::byte> weights(static_cast<size_t>(unit.bytes()), std::byte{1});
  made.engine->acquire(0).copy_to_host(0, weights);
  EXPECT_EQ(weights, std::vector<std::byte>(weights.size()));
  std::vector<float> moments(static_cast<size_t>(unit.segments[0].elements), 1);
  made.engine->read_state(0, 0, "m", moments);
  EXPECT_EQ(moments, std::vector<float>(moments.size()));
}

TEST(UnitsOnTheDevice, TakeThereWhatWasPlanned) {
  const Made made = make(config_of(Placement::device));
  const Plan& plan = made.engine->plan();
  EXPECT_EQ(plan.units_on_device(), 5) << "all but the frozen one";
  auto& device = dynamic_cast<kernels::SimulatedDevice&>(*made.device);
  EXPECT_EQ(device.used_bytes(), plan.device_bytes());
  EXPECT_LE(made.engine->stats().host_peak_bytes, plan.host_bytes());
  EXPECT_EQ(device.unpinned_copies(), 0) << "weights were loaded";
}

/// With part of the rest on NVMe: three tiers at once.
TEST(UnitsOnTheDevice, GoTogetherWithEveryOtherTier) {
  Config config = config_of(Placement::automatic);
  config.device_budget_bytes = 400 << 10;
  const Made host = make(config_of(Placement::host), "host");
  const Plan roomy = make(config).engine->plan();
  config.host_budget_bytes = roomy.host_bytes() - roomy.states_host_bytes / 2;
  const Made made = make(config);
  const Plan& plan = made.engine->plan();
  ASSERT_GT(plan.units_on_device(), 0);
  ASSERT_GT(plan.states_nvme_bytes, 0);
  for (int step = 0; step < (kWatched ? 3 : 8); ++step) {
    const ToyStep taken = toy_step(*made.engine, step, 1, 0);
    const ToyStep expected = toy_step(*host.engine, step, 1, 0);
    EXPECT_EQ(taken.loss, expected.loss) << "step " << step;
    EXPECT_EQ(taken.result.norm, expected.result.norm) << "step " << step;
  }
  expect_same_bits(toy_contents(*made.engine), toy_contents(*host.engine), "three tiers");
}

/// An fp32 unit takes gradients in fp16, as those of host memory do.
TEST(UnitsOnTheDevice, TakeGradientsInHalfPrecision) {
  const ToyKind kind{{}, optim::Format::fp32};
  const Made made = make(config_of(Placement::device), "simulated", kind);
  const engine::Segment& segment = made.engine->layout().units[0].segments[0];
  std::vector<float> expected;
  const auto halves = std::make_shared<std::vector<optim::Fp16>>();
  for (int64_t i = 0; i < segment.elements; ++i) expected.push_back(static_cast<float>(i % 61) - 30);
  halves->resize(expected.size());
  optim::narrow(optim::Element::fp16, std::span<const float>(expected),
                reinterpret_cast<std::byte*>(halves->data()));
  const auto bytes = std::as_bytes(std::span(*halves));
  made.engine->add_gradient(0, 0, bytes, "F16");
  const auto there = std::make_shared<kernels::DeviceMemory>(made.device->allocate(std::ssize(bytes)));
  const auto queue = made.device->make_stream();
  queue->copy_from_host(there->data(), bytes.data(), std::ssize(bytes));
  made.engine->add_gradient(0, 0, {there->data(), there->bytes(), "F16", there},
                            engine::Queue{queue->native()});
  for (float& value : expected) value *= 2;
  std::vector<float> seen(expected.size());
  made.engine->read_state(0, 0, "grad", seen);
  EXPECT_EQ(seen, expected);
}

/// Work that was given weights before step(), on a queue that is far behind, sees them as they were then;
/// what comes after sees the new ones.
TEST(UnitsOnTheDevice, AreUpdatedAfterWhoReadsThemAndBeforeWhoReadsThemNext) {
  const Made made = make(config_of(Placement::device));
  Engine& engine = *made.engine;
  const auto bytes = static_cast<size_t>(engine.layout().units[0].bytes());
  std::vector<std::byte> before(bytes), after(bytes), seen(bytes), seen_next(bytes);
  auto behind = made.device->make_stream();
  const auto gate = std::make_shared<kernels::Gate>();
  const Queue queue{behind->native()};
  engine.acquire(0).copy_to_host(0, before);
  behind->wait(kernels::Event(gate));
  {
    const Lease lease = engine.acquire(0, queue);
    behind->copy_to_host(seen.data(), lease.data(), lease.bytes());
  }
  for (int s : {0, 1})
    toy_add_gradient_always(engine, toy_leased(engine, engine.acquire(0), 0, s), 0, s, 0, 0, 0);
  engine.step(toy_groups(0));  // does not wait for the queue
  {
    const Lease lease = engine.acquire(0, queue);
    behind->copy_to_host(seen_next.data(), lease.data(), lease.bytes());
  }
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate->open();
  });
  engine.acquire(0).copy_to_host(0, after);
  opens.join();
  behind->record().wait();
  EXPECT_EQ(seen, before);
  EXPECT_EQ(seen_next, after);
  EXPECT_NE(before, after);
}

/// As a script's that keeps a view: what it was given before step() reads what was there then.
TEST(UnitsOnTheDevice, AreUpdatedAfterWhatALeaseThatIsHeldWasGiven) {
  const Made made = make(config_of(Placement::device));
  Engine& engine = *made.engine;
  const auto bytes = static_cast<size_t>(engine.layout().units[0].bytes());
  std::vector<std::byte> before(bytes), seen(bytes);
  engine.acquire(0).copy_to_host(0, before);
  auto behind = made.device->make_stream();
  const auto gate = std::make_shared<kernels::Gate>();
  behind->wait(kernels::Event(gate));
  const Lease held = engine.acquire(0, Queue{behind->native()});
  behind->copy_to_host(seen.data(), held.data(), held.bytes());
  for (int s : {0, 1})
    toy_add_gradient_always(engine, toy_leased(engine, engine.acquire(0), 0, s), 0, s, 0, 0, 0);
  engine.step(toy_groups(0));
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate->open();
  });
  engine.synchronize();
  opens.join();
  behind->record().wait();
  EXPECT_EQ(seen, before);
  std::vector<std::byte> after(bytes);
  engine.acquire(0).copy_to_host(0, after);
  EXPECT_NE(before, after);
}

TEST(UnitsOnTheDevice, AreReplacedAfterWhoReadsThem) {
  const Made made = make(config_of(Placement::device));
  Engine& engine = *made.engine;
  const engine::Unit& unit = engine.layout().units[5];  // fp32
  const auto bytes = static_cast<size_t>(unit.bytes());
  std::vector<std::byte> before(bytes), seen(bytes);
  engine.acquire(5).copy_to_host(0, before);
  auto behind = made.device->make_stream();
  const auto gate = std::make_shared<kernels::Gate>();
  behind->wait(kernels::Event(gate));
  {
    const Lease lease = engine.acquire(5, Queue{behind->native()});
    behind->copy_to_host(seen.data(), lease.data(), lease.bytes());
  }
  std::thread opens([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate->open();
  });
  const std::vector<float> fresh(static_cast<size_t>(unit.segments[0].elements), 0.25F);
  engine.load_weight(5, 0, std::as_bytes(std::span(fresh)), "F32");
  opens.join();
  behind->record().wait();
  EXPECT_EQ(seen, before);
  std::vector<float> read(fresh.size());
  engine.read_weight(5, 0, std::as_writable_bytes(std::span(read)), "F32");
  EXPECT_EQ(read, fresh);
}

/// Gradients of this step come while the last update is still to be done.
TEST(UnitsOnTheDevice, TakeGradientsAfterTheUpdateThatUsesTheLast) {
  const Made made = make(config_of(Placement::device)), host = make(config_of(Placement::host), "host");
  for (const Made* each : {&made, &host}) {
    Engine& engine = *each->engine;
    auto queue = each->device->make_stream();
    for (int step = 0; step < 3; ++step) {
      const std::vector<float> ones(5000, 0.5F + static_cast<float>(step));
      auto memory = std::make_shared<kernels::DeviceMemory>(each->device->allocate(20000));
      queue->copy_from_host(memory->data(), ones.data(), 20000);
      const std::byte* const data = memory->data();
      engine.add_gradient(5, 0, DeviceArray{data, 20000, "F32", std::move(memory)}, Queue{queue->native()});
      EXPECT_NEAR(engine.step(toy_groups(step)).norm, std::sqrt(5000.0) * ones[0], 1e-3);
    }
  }
  expect_same_bits(toy_contents(*made.engine), toy_contents(*host.engine), "three steps in a row");
}

TEST(UnitsOnTheDevice, AreUntouchedByAStepThatIsSkipped) {
  const Made made = make(config_of(Placement::device));
  Engine& engine = *made.engine;
  const std::vector<float> before = toy_contents(engine);
  std::vector<float> bad(5000, 1.0F);
  bad[4321] = std::numeric_limits<float>::infinity();
  engine.add_gradient(5, 0, std::as_bytes(std::span(bad)), "F32");
  EXPECT_TRUE(engine.step(toy_groups(0)).skipped);
  expect_same_bits(toy_contents(engine), before, "after a skipped step");
  EXPECT_FALSE(engine.has_gradient(5, 0));
}

/// Memory that is no device memory: the kernel finds it late, and the engine says so.
TEST(UnitsOnTheDevice, FailTheEngineWhereTheDeviceFails) {
  const Made made = make(config_of(Placement::device));
  auto queue = made.device->make_stream();
  const auto host = std::make_shared<std::vector<std::byte>>(20000);
  made.engine->add_gradient(5, 0, DeviceArray{host->data(), std::ssize(*host), "F32", host},
                            Queue{queue->native()});
  EXPECT_THROW(made.engine->step(toy_groups(0)), engine::EngineFailed);
  EXPECT_THROW(made.engine->step(toy_groups(0)), engine::EngineFailed);
}

TEST(UnitsOnTheDevice, LeaveATraceOfTheirUpdates) {
  const Made made = make(config_of(Placement::device));
  Engine& engine = *made.engine;
  toy_step(engine, 0, 1, 0);
  engine.record_journal(true);
  toy_step(engine, 1, 1, 0);
  engine.synchronize();
  engine.record_journal(false);
  std::set<int> updated, expected;
  for (int u = 0; u < static_cast<int>(engine.layout().units.size()); ++u) {
    const engine::Unit& unit = engine.layout().units[u];
    for (size_t s = 0; unit.trainable() && s < unit.segments.size(); ++s) {
      if (!toy_skips(u, static_cast<int>(s), 1, 0)) expected.insert(u);
    }
  }
  for (const engine::DeviceSpan& span : engine.take_device_spans()) {
    EXPECT_LE(span.begin_ns, span.end_ns);
    if (span.kind == engine::DeviceSpan::Kind::update) updated.insert(span.unit);
  }
  EXPECT_EQ(updated, expected);
}

}  // namespace
}  // namespace overspill::testing
