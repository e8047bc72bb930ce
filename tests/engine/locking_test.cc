// Nothing waits for a disk or a device, and no weights are copied, while the engine's mutex is held
// (docs/architecture.md). Where that happens another thread has to get the mutex first.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "engine/collectives/self_communicator.h"
#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "engine/states/updater.h"
#include "engine/weights/gather.h"
#include "io/memory_store.h"
#include "kernels/simulated_device.h"
#include "tests/engine/around_device.h"
#include "tests/engine/around_store.h"
#include "tests/engine/mutex_probe.h"
#include "tests/engine/parts.h"
#include "tests/engine/toy_model.h"
#include "tests/kernels/gate.h"
#include "tests/watched.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Placement;

constexpr int kUnits = 6;

Config config_of(bool speculate = false) {
  Config config;
  config.nvme = {"/nowhere"};  // the store is in memory
  config.threads = 2;
  config.chunk_elements = 4096;
  config.prefetch_units = 2;
  config.placement = Placement::nvme;
  config.host_budget_bytes = 64 << 20;
  config.gradient_accumulation = 2;
  config.max_grad_norm = speculate ? 1e9 : 1.0;
  config.speculate = speculate;
  return config;
}

/// With the smallest host budget that it takes.
Config smallest(Config config, const engine::DeviceTraits& traits) {
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  for (config.host_budget_bytes = 64 << 10;; config.host_budget_bytes += 4 << 10) {
    try {
      (void)make_plan(layout, config, traits);
      return config;
    } catch (const engine::BudgetError&) {
    }
  }
}

/// A slow store in memory.
std::unique_ptr<io::Store> slow_store() {
  io::Faults slow{.seed = 3};
  slow.delay_max = std::chrono::microseconds(300);
  return io::make_memory_store(64 << 20, slow, 65536);
}

void train(Engine& engine, int steps) {
  toy_load(engine);
  for (int step = 0; step < steps; ++step) {
    engine.expect_step(toy_groups(step));
    toy_step(engine, step, 2, 0);
  }
}

TEST(EngineMutex, IsFreeWhileTheStoreMakesRoom) {
  for (const bool speculate : {false, true}) {
    MutexProbe probe;
    const Config config = config_of(speculate);
    engine::Resources resources = make_resources(toy_units(), config, {"host", "memory", 1});
    resources.store = std::make_unique<WatchedAllocations>(slow_store(), [&] { probe.pass(); });
    Engine engine(toy_units(), config, std::move(resources));
    probe.watch(engine);
    train(engine, 4);
    EXPECT_FALSE(probe.held());
    EXPECT_GT(probe.passed(), 50);
    if (speculate) {  // on a loaded machine the guesses of a step may not be made in time
      for (int more = 0; more < 200 && engine.stats().guesses_taken == 0; ++more) train(engine, 1);
      EXPECT_GT(engine.stats().guesses_taken, 0);
    }
    probe.forget();
  }
}

// ---- the device

/// Copies stand still until a thread waits for the device. So that thread finds its copy under way on every
/// machine, also where the thread itself runs late.
class HeldCopies {
 public:
  /// From here on.
  void begin() {
    const std::lock_guard guard(mutex_);
    holds_ = true;
  }
  /// What the next copy waits for.
  kernels::Event next() {
    const std::lock_guard guard(mutex_);
    return holds_ ? kernels::Event(gate_) : kernels::Event();
  }
  /// The copies that were asked for until now go on.
  void let_go() {
    const std::lock_guard guard(mutex_);
    gate_->open();
    gate_ = std::make_shared<kernels::Gate>();
  }
  void end() {
    let_go();
    const std::lock_guard guard(mutex_);
    holds_ = false;
    gate_->open();
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<kernels::Gate> gate_ = std::make_shared<kernels::Gate>();
  bool holds_ = false;
};

class SlowCopies : public ::testing::TestWithParam<Placement> {};

constexpr int kSteps = 4;

/// Trains with room for three of six units on a device, and no more host memory than has to be.
void train_on(Placement placement, int prefetch_units, const DeviceHooks& hooks, MutexProbe& probe,
              HeldCopies& copies) {
  Config config = config_of();
  config.prefetch_units = prefetch_units;
  config.device_budget_bytes = 92 << 10;
  config.placement = placement;
  config = smallest(config, {.shares_host_memory = false, .updates = kernels::all_formats()});
  engine::Resources resources = make_resources(toy_units(), config, {"simulated", "memory", 1});
  resources.device = std::make_shared<AroundDevice>(kernels::make_simulated_device(), hooks);
  const std::shared_ptr<kernels::Device> device = resources.device;
  if (resources.store != nullptr) resources.store = slow_store();
  Engine engine(toy_units(), config, std::move(resources));
  toy_load(engine);
  auto queue = device->make_stream();
  probe.watch(engine);
  copies.begin();
  for (int step = 0; step < kSteps; ++step) {
    engine.begin_pass({true, true});
    for (int u = 0; u < kUnits; ++u) (void)engine.acquire(u, {queue->native()});
    for (int u = kUnits - 1; u >= 0; --u) {
      (void)engine.acquire(u, {queue->native()});
      if (!engine.layout().units[u].trainable()) continue;
      const std::vector<float> seen(static_cast<size_t>(engine.layout().units[u].segments[0].elements), 0.5F);
      toy_add_gradient_always(engine, seen, u, 0, step, 0, 0);
    }
    engine.step(toy_groups(step));
  }
  copies.end();
  EXPECT_FALSE(probe.held());
  probe.forget();
}

TEST_P(SlowCopies, AreNotWaitedForWithTheMutex) {
  MutexProbe probe;
  HeldCopies copies;
  const auto before_wait = [&](bool done) {
    if (done) return;
    probe.pass();
    copies.let_go();
  };
  train_on(GetParam(), 2, {.before_wait = before_wait, .holds_copy = [&] { return copies.next(); }}, probe,
           copies);
  EXPECT_GE(probe.passed(), kSteps) << "each step waits for the device";
}

/// A call on the caller's own queue waits while the queue is full, and workers need the mutex meanwhile.
TEST_P(SlowCopies, CallsOnTheCallersQueueAreMadeWithoutTheMutex) {
  MutexProbe probe;
  HeldCopies copies;
  DeviceHooks hooks{.before_wait = [&](bool /*done*/) { copies.let_go(); }};
  hooks.before_adopted = [&] { probe.pass(); };
  train_on(GetParam(), 2, hooks, probe, copies);
  EXPECT_GE(probe.passed(), 3 * kUnits * kSteps) << "leases begin and end, and gradients come";
}

/// The device goes on whoever has the mutex. Once a thread found no room, for a copy was under way, and then
/// no copy under way to wait for, and said that the budget is too small.
TEST_P(SlowCopies, MayEndAtAnyMoment) {
  for (unsigned seed = 0; seed < 16; ++seed) {
    SCOPED_TRACE(seed);
    MutexProbe probe;
    HeldCopies copies;
    std::mutex mutex;
    std::minstd_rand dice(seed);
    const auto after_look = [&] {
      const std::lock_guard guard(mutex);
      const bool ends = dice() % 2 == 0;
      if (ends) copies.let_go();
      return ends;
    };
    const auto before_wait = [&](bool done) {
      if (!done) copies.let_go();
    };
    train_on(
        GetParam(), 0,  // nothing else is on its way, for which the thread would wait
        {.before_wait = before_wait, .after_look = after_look, .holds_copy = [&] { return copies.next(); }},
        probe, copies);
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, SlowCopies, ::testing::Values(Placement::host, Placement::nvme),
                         [](const auto& info) { return placement_name(info.param); });

/// CUDA may keep the thread that submits a copy until it is done, where nobody pinned the host's memory.
class UnpinnedCopies : public ::testing::Test {
 protected:
  /// With so much memory on the device.
  void start(int64_t device_bytes, Placement placement) {
    Config config = config_of();
    config.placement = placement;
    config.device_budget_bytes = device_bytes;
    engine::Resources resources = make_resources(toy_units(), config, {"simulated", "memory", 1});
    const auto before_wait = [this](bool done) {
      if (!done) probe_.pass();
    };
    resources.device = std::make_shared<AroundDevice>(kernels::make_simulated_device(),
                                                      DeviceHooks{.before_wait = before_wait});
    engine_ = std::make_unique<Engine>(toy_units(), config, std::move(resources));
    toy_load(*engine_);
  }
  void start_with_units_on_the_device() {
    start(64 << 20, Placement::automatic);
    ASSERT_TRUE(engine_->plan().on_device[1]);
  }
  /// Some thread of the engine's came to wait, and none had the mutex.
  void expect_free() {
    EXPECT_FALSE(probe_.held());
    EXPECT_GT(probe_.passed(), 0);
    probe_.forget();
  }
  std::vector<float> some() const {
    return std::vector<float>(static_cast<size_t>(engine_->layout().units[1].segments[0].elements), 0.5F);
  }
  void add_gradient() { toy_add_gradient_always(*engine_, some(), 1, 0, 0, 0, 0); }
  void copy_lease() {
    const engine::Lease lease = engine_->acquire(1);
    std::vector<std::byte> copy(static_cast<size_t>(lease.bytes()));
    probe_.watch(*engine_);
    lease.copy_to_host(0, copy);
    expect_free();
    EXPECT_EQ(toy_widened("BF16", copy.data(), some().size()), toy_leased(*engine_, lease, 1, 0));
  }

  MutexProbe probe_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(UnpinnedCopies, OfAGatheredUnitsWeightsAreMadeWithoutTheMutex) {
  start(92 << 10, Placement::host);
  ASSERT_FALSE(engine_->plan().on_device[1]);
  copy_lease();
}

TEST_F(UnpinnedCopies, OfWeightsThatLiveOnTheDeviceAreMadeWithoutTheMutex) {
  start_with_units_on_the_device();
  copy_lease();
}

TEST_F(UnpinnedCopies, OfAGradientFromTheHostAreMadeWithoutTheMutex) {
  start_with_units_on_the_device();
  probe_.watch(*engine_);
  add_gradient();
  expect_free();
}

TEST_F(UnpinnedCopies, OfAGradientToTheHostAreMadeWithoutTheMutex) {
  start_with_units_on_the_device();
  add_gradient();
  std::vector<float> gradient = some();
  probe_.watch(*engine_);
  engine_->read_state(1, 0, "grad", gradient);
  expect_free();
  EXPECT_NE(gradient, some());
}

// ---- long copies

/// Memory whose every page, once, calls the probe on the thread that touches it first.
class Tripwire {
 public:
  Tripwire(std::span<std::byte> memory, MutexProbe& probe) : memory_(memory), probe_(probe) {
    current_ = this;
    struct sigaction action {};
    action.sa_sigaction = &Tripwire::on_touch;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(SIGSEGV, &action, &before_);
  }
  ~Tripwire() {
    open(memory_);
    ::sigaction(SIGSEGV, &before_, nullptr);
    current_ = nullptr;
  }
  Tripwire(const Tripwire&) = delete;
  Tripwire& operator=(const Tripwire&) = delete;

  void arm() { ::mprotect(memory_.data(), memory_.size(), PROT_NONE); }

 private:
  static constexpr size_t kPage = 4096;

  static void open(std::span<std::byte> memory) {
    ::mprotect(memory.data(), memory.size(), PROT_READ | PROT_WRITE);
  }
  static void on_touch(int, siginfo_t* info, void*) {
    auto* const touched = static_cast<std::byte*>(info->si_addr);
    Tripwire* const self = current_;
    if (self == nullptr || touched < self->memory_.data() ||
        touched >= self->memory_.data() + self->memory_.size()) {
      ::sigaction(SIGSEGV, &self->before_, nullptr);  // a fault like any other
      return;
    }
    self->probe_.pass();
    const auto page = reinterpret_cast<uintptr_t>(touched) / kPage * kPage;
    open({reinterpret_cast<std::byte*>(page), kPage});
  }

  static inline std::atomic<Tripwire*> current_ = nullptr;
  const std::span<std::byte> memory_;
  MutexProbe& probe_;
  struct sigaction before_ {};
};

/// Remembers what memory the engine registers.
class RegisteringStore final : public AroundStore {
 public:
  RegisteringStore(std::unique_ptr<io::Store> store, std::vector<std::span<std::byte>>& registered)
      : AroundStore(std::move(store)), registered_(registered) {}
  void register_memory(std::span<std::byte> memory) override { registered_.push_back(memory); }

 private:
  std::vector<std::span<std::byte>>& registered_;
};

/// Trains with weights on NVMe, on a device that shares the host's memory. Nobody who touches the memory of
/// this length, which the engine registers with its store, has the mutex; `least` pages are touched.
void expect_free_where_touched(const std::function<int64_t(const engine::Plan&)>& bytes_of, int64_t least) {
  if (kWatched) GTEST_SKIP() << "a sanitizer has the signal that this test needs";
  MutexProbe probe;
  std::vector<std::span<std::byte>> registered;
  const Config config = config_of();
  engine::Resources resources = make_resources(toy_units(), config, {"host", "memory", 1});
  resources.store = std::make_unique<RegisteringStore>(slow_store(), registered);
  Engine engine(toy_units(), config, std::move(resources));
  std::vector<std::span<std::byte>> found;
  for (const auto& memory : registered) {
    if (std::ssize(memory) == bytes_of(engine.plan())) found.push_back(memory);
  }
  ASSERT_EQ(found.size(), 1U) << "the memory is not known by its size";
  toy_load(engine);
  probe.watch(engine);
  {
    Tripwire wire(found[0], probe);
    for (int step = 0; step < 6; ++step) {
      wire.arm();
      toy_step(engine, step, 2, 0);
    }
  }
  EXPECT_FALSE(probe.held());
  EXPECT_GT(probe.passed(), least);
  probe.forget();
}

/// Of a unit that is gathered, chunks come from the store, from ring slots, and from workers that have just
/// updated them.
TEST(EngineMutex, IsFreeWhileWeightsAreCopied) {
  expect_free_where_touched([](const engine::Plan& plan) { return plan.gather_host_bytes; }, 50);
}

/// States that were never written are zero, and whole chunks of the ring are cleared for them in the first
/// step.
TEST(EngineMutex, IsFreeWhileTheRingIsFilled) {
  expect_free_where_touched([](const engine::Plan& plan) { return plan.ring_slots * plan.ring_slot_bytes; },
                            10);
}

TEST(EngineMutex, IsFreeWhileALeaseIsCopied) {
  if (kWatched) GTEST_SKIP() << "a sanitizer has the signal that this test needs";
  MutexProbe probe;
  const Config config = config_of();
  Engine engine(toy_units(), config, make_resources(toy_units(), config, {"host", "memory", 1}));
  toy_load(engine);
  const engine::Lease lease = engine.acquire(1);
  const auto bytes = static_cast<size_t>(lease.bytes());
  const size_t mapped = (bytes + 4095) / 4096 * 4096;
  void* const memory = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const std::span to(static_cast<std::byte*>(memory), bytes);
  probe.watch(engine);
  {
    Tripwire wire({to.data(), mapped}, probe);
    wire.arm();
    lease.copy_to_host(0, to);
  }
  EXPECT_FALSE(probe.held());
  EXPECT_GT(probe.passed(), 0);
  probe.forget();
  ::munmap(memory, mapped);
}

// ---- the ring

TEST(Ring, ThatIsTooSmallForAChunkIsRefusedBeforeAnythingIsRead) {
  const Config config = config_of();
  engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  engine::Plan plan = make_plan(layout, config, {});
  plan.ring_slot_bytes -= 4096;
  Owners o(std::move(layout), std::move(plan), config,
           make_resources(toy_units(), config, {"host", "memory", 1}));
  engine::Gatherer gatherer(o.setup, o.core, o.hardware, o.model, o.demand);
  engine::Snapshot snapshot(o.core, o.model);
  EXPECT_THROW(engine::Updater(o.setup, o.core, o.hardware, o.model, o.demand, gatherer, snapshot),
               std::logic_error);
}

}  // namespace
}  // namespace overspill::testing
