// Sums of several micro-batches on the device: which ones the plan puts there, that they cross the link once,
// and that whoever looks at a gradient, changes it or steps early finds what a host that adds them up has.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "tests/engine/framework.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"
#include "tests/watched.h"

namespace overspill::testing::sums_there {
namespace {

using engine::Config;
using engine::DeviceArray;
using engine::Engine;
using engine::Placement;
using engine::Plan;
using engine::Queue;

constexpr int64_t kMiB = 1 << 20;
constexpr int kMicroBatches = 3;

// ---- the plan

std::vector<engine::UnitSpec> layers(int count) {
  std::vector<engine::UnitSpec> units;
  for (int i = 0; i < count; ++i) {
    const std::string name = fmt::format("layer{}", i);
    units.push_back({name, optim::Format::exact, "BF16", {{name + ".weight", {1024, 1024}, 0, {}}}});
  }
  return units;
}

Plan plan_of(int64_t device_kib, int64_t micro_batches, int64_t host_mib = 1024, int world = 1) {
  Config config;
  config.host_budget_bytes = host_mib * kMiB;
  config.device_budget_bytes = device_kib << 10;
  config.nvme = {"/nowhere"};
  config.gradient_accumulation = micro_batches;
  const auto layout = engine::make_layout(layers(8), config.chunk_elements, 0, world);
  return make_plan(layout, config, {.shares_host_memory = false, .updates = kernels::all_formats()});
}

int64_t summed(const Plan& plan) {
  return std::count(plan.summed_on_device.begin(), plan.summed_on_device.end(), true);
}

TEST(SumsOnTheDevice, TakeWhatAllWeightsLeave) {
  constexpr int64_t kWeights = 16 * 1024 + 8 * 4 + 32;  // KiB; squares
  EXPECT_EQ(summed(plan_of(kWeights, 4)), 0);
  EXPECT_EQ(summed(plan_of(kWeights + 4096, 4)), 1) << "4 MiB each";
  const Plan three = plan_of(kWeights + 3 * 4096, 4);
  EXPECT_EQ(three.summed_on_device, (std::vector<bool>{true, true, true, false, false, false, false, false}));
  EXPECT_EQ(three.accumulators_device_bytes, 3 * 4 * kMiB);
  EXPECT_NE(three.text().find("sums of micro-batches there"), std::string::npos) << three.text();
  EXPECT_EQ(summed(plan_of(kWeights + 32 * 1024, 1)), 0) << "there is nothing to sum";
  EXPECT_EQ(summed(plan_of(kWeights + 32 * 1024, 4, 1024, 2)), 0) << "several ranks sum elsewhere";
}

/// They save more for their bytes than units do that live there, and those need none.
TEST(SumsOnTheDevice, ComeBeforeUnitsThatLiveThere) {
  int64_t before = 0;
  for (int64_t kib = 8 << 10; kib < 200 << 10; kib += 512) {
    const Plan plan = plan_of(kib, 4);
    EXPECT_LE(plan.device_bytes(), kib << 10);
    EXPECT_GE(summed(plan) + plan.units_on_device(), before) << kib;
    before = summed(plan) + plan.units_on_device();
    if (plan.units_on_device() > 0) {
      EXPECT_EQ(before, 8) << kib;
    }
  }
  EXPECT_EQ(before, 8);
}

TEST(SumsOnTheDevice, AreNoneOfGradientsThatAreSpilled) {
  int64_t beside_spilled = 0;
  for (int64_t host_mib = 38; host_mib < 120; ++host_mib) {
    const Plan plan = plan_of(50 << 10, 4, host_mib);
    if (plan.gradients_nvme_bytes > 0 && summed(plan) > 0) ++beside_spilled;
    for (size_t c = 0; c < plan.gradients_on_nvme.size(); ++c)
      EXPECT_FALSE(plan.gradients_on_nvme[c] && plan.summed_on_device[c / 2]) << "two chunks a unit";
    EXPECT_EQ(plan.accumulators_device_bytes, summed(plan) * 4 * kMiB);
  }
  EXPECT_GT(beside_spilled, 0);
}

// ---- the engine

Config config_of(bool speculate = false) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {"/nowhere"};  // the store is in memory
  config.gradient_accumulation = kMicroBatches;
  config.chunk_elements = 4096;
  config.max_grad_norm = speculate ? 1e9 : 1.0;
  config.speculate = speculate;
  config.poison = true;
  return config;
}

/// What all sums take beside the weights, and not what a unit would that lives there.
int64_t budget_for_all_sums(Config config) {
  const engine::Layout layout = engine::make_layout(toy_units(), config.chunk_elements, 0, 1);
  const engine::DeviceTraits device{.shares_host_memory = false, .updates = kernels::all_formats()};
  for (config.device_budget_bytes = 128 << 10;; config.device_budget_bytes += 1024) {
    const Plan plan = make_plan(layout, config, device);
    if (summed(plan) == 5) return config.device_budget_bytes;  // all but the frozen one
    if (plan.units_on_device() > 0) throw std::logic_error("no budget takes all sums and no unit");
  }
}

struct Made {
  std::shared_ptr<kernels::Device> device;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<kernels::Stream> queue;

  /// As a framework on the device gives it.
  void give(int unit, int segment, int step, int micro) const {
    const engine::Unit& u = engine->layout().units[unit];
    const auto bytes = gradient(u, unit, segment, step, micro);
    auto there = std::make_shared<kernels::DeviceMemory>(device->allocate(std::ssize(bytes)));
    queue->copy_from_host(there->data(), bytes.data(), std::ssize(bytes));
    queue->record().wait();
    const std::byte* const data = there->data();
    engine->add_gradient(unit, segment, DeviceArray{data, std::ssize(bytes), u.dtype, std::move(there)},
                         Queue{queue->native()});
  }
  void give_here(int unit, int segment, int step, int micro) const {
    const engine::Unit& u = engine->layout().units[unit];
    engine->add_gradient(unit, segment, gradient(u, unit, segment, step, micro), u.dtype);
  }
  static std::vector<std::byte> gradient(const engine::Unit& u, int unit, int segment, int step, int micro) {
    const std::vector<float> seen(static_cast<size_t>(u.segments[segment].elements), 0.5F);
    return toy_gradient_bytes(u.dtype, seen, unit, segment, step, micro, 0);
  }
};

Made make(Config config, const std::string& device) {
  if (device != "host") config.device_budget_bytes = budget_for_all_sums(config);
  engine::ResourceOptions options;
  options.device = device;
  options.io_backend = "memory";
  options.seed = 5;
  engine::Resources resources = make_resources(toy_units(), config, options);
  Made made{resources.device, nullptr, resources.device->make_stream()};
  made.engine = std::make_unique<Engine>(toy_units(), config, std::move(resources));
  toy_load(*made.engine);
  return made;
}

/// The same is done to an engine that sums on the device and to one that sums on the host.
class Both {
 public:
  explicit Both(const Config& config = config_of())
      : there_(make(config, "simulated")), here_(make(config, "host")) {
    EXPECT_EQ(summed(there_.engine->plan()), 5);
    EXPECT_EQ(there_.engine->plan().units_on_device(), 0);
  }
  void each(const std::function<void(const Made&)>& what) const {
    what(there_);
    what(here_);
  }
  void pass(int step, int micro) const {
    each([&](const Made& made) {
      made.engine->begin_pass({true, true});
      const auto& units = made.engine->layout().units;
      for (int u = static_cast<int>(units.size()) - 1; u >= 0; --u) {
        for (int s = 0; units[u].trainable() && s < std::ssize(units[u].segments); ++s)
          made.give(u, s, step, micro);
      }
    });
  }
  void step(int number) const {
    std::vector<double> norms;
    each([&](const Made& made) { norms.push_back(made.engine->step(toy_groups(number)).norm); });
    EXPECT_EQ(norms[0], norms[1]) << "step " << number;
  }
  void expect_alike(const char* what) const {
    expect_same_bits(toy_contents(*there_.engine), toy_contents(*here_.engine), what);
  }
  const Made& there() const { return there_; }

 private:
  Made there_, here_;
};

TEST(SumsOnTheDevice, CrossTheLinkOnce) {
  const Both both;
  Engine& engine = *both.there().engine;
  for (int step = 0; step < 2; ++step) {
    engine.record_journal(true);
    for (int micro = 0; micro < kMicroBatches; ++micro) both.pass(step, micro);
    engine.grad_norm();  // all of them are taken in
    engine.record_journal(false);
    int64_t down = 0, segments = 0;
    for (const engine::DeviceSpan& span : engine.take_device_spans())
      down += span.kind == engine::DeviceSpan::Kind::copy_down ? 1 : 0;
    for (const engine::Unit& unit : engine.layout().units)
      segments += unit.trainable() ? std::ssize(unit.segments) : 0;
    EXPECT_EQ(down, segments) << "step " << step;
    (void)engine.take_journal();
    both.step(step);
  }
  both.expect_alike("two steps");
}

TEST(SumsOnTheDevice, AreRightForWhoLooksBetweenMicroBatches) {
  const Both both;
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      both.pass(step, micro);
      std::vector<std::vector<float>> seen;
      std::vector<double> norms;
      both.each([&](const Made& made) {
        std::vector<float> values(static_cast<size_t>(made.engine->layout().units[0].segments[0].elements));
        made.engine->read_state(0, 0, "grad", values);
        seen.push_back(values);
        norms.push_back(made.engine->grad_norm());
      });
      EXPECT_EQ(seen[0], seen[1]);
      EXPECT_EQ(norms[0], norms[1]);
    }
    both.step(step);
  }
  both.expect_alike("looked at");
}

TEST(SumsOnTheDevice, MayBeOfFewerOrMoreThanWasSaid) {
  for (const bool speculate : {false, true}) {
    const Both both(config_of(speculate));
    const int micro_batches[] = {
        kMicroBatches, 1, 2, kMicroBatches + 2, kMicroBatches, kMicroBatches, 2, 2, 1};
    int step = 0;
    for (const int count : micro_batches) {
      both.each([&](const Made& made) { made.engine->expect_step(toy_groups(step)); });
      for (int micro = 0; micro < count; ++micro) both.pass(step, micro);
      both.step(step++);
    }
    both.expect_alike(speculate ? "guessed" : "not guessed");
  }
}

TEST(SumsOnTheDevice, GoOnWhereTheHostHasChangedThem) {
  const Both both;
  const auto change = [](int step, const Made& made) {
    Engine& engine = *made.engine;
    switch (step) {
      case 0:  // scaled by the next gradient
        engine.clip_grad_norm(0.25);
        break;
      case 1:
        made.give_here(0, 0, 7, 1);
        break;
      case 2:
        engine.replace_gradient(0, 0, Made::gradient(engine.layout().units[0], 0, 0, 9, 0),
                                engine.layout().units[0].dtype);
        break;
      case 3:
        engine.replace_gradient(0, 0, {}, engine.layout().units[0].dtype);
        break;
      case 4:
        engine.zero_gradients();
        break;
      default:
        engine.clear_gradients();
    }
  };
  for (int step = 0; step < 6; ++step) {
    both.pass(step, 0);
    both.each([&](const Made& made) { change(step, made); });
    both.pass(step, 1);
    both.pass(step, 2);
    both.step(step);
    both.expect_alike(fmt::format("changed by way {}", step).c_str());
  }
}

TEST(SumsOnTheDevice, StayWhereTheirGradientsAreUsedAgain) {
  const Both both;
  for (int micro = 0; micro < kMicroBatches; ++micro) both.pass(0, micro);
  both.step(0);
  both.each([](const Made& made) { made.engine->reuse_gradients(); });
  both.step(1);
  both.each([](const Made& made) { made.engine->reuse_gradients(); });
  both.pass(2, 0);  // added to what is there
  both.step(2);
  both.expect_alike("used again");
  both.each([](const Made& made) {
    made.engine->reuse_gradients();
    made.engine->clip_grad_norm(0.25);
  });
  both.pass(3, 0);  // added to what is scaled, on the host
  both.step(3);
  both.expect_alike("clipped and used again");
}

TEST(SumsOnTheDevice, TellOfWhatIsNotFinite) {
  const Both both;
  for (int micro = 0; micro < kMicroBatches; ++micro) {
    both.pass(0, micro);
    if (micro > 0) continue;
    both.each([](const Made& made) {
      const engine::Unit& unit = made.engine->layout().units[0];
      const std::vector<float> seen(static_cast<size_t>(unit.segments[0].elements),
                                    std::numeric_limits<float>::infinity());
      const auto bytes = toy_gradient_bytes(unit.dtype, seen, 0, 0, 0, 0, 0);
      auto data = std::make_shared<kernels::DeviceMemory>(made.device->allocate(std::ssize(bytes)));
      made.queue->copy_from_host(data->data(), bytes.data(), std::ssize(bytes));
      made.queue->record().wait();
      made.engine->add_gradient(0, 0, DeviceArray{data->data(), std::ssize(bytes), unit.dtype, data},
                                Queue{made.queue->native()});
    });
  }
  both.each([](const Made& made) {
    const engine::StepResult result = made.engine->step(toy_groups(0));
    EXPECT_TRUE(result.skipped);
    EXPECT_EQ(result.not_finite, made.engine->layout().units[0].segments[0].name);
  });
}

}  // namespace
}  // namespace overspill::testing::sums_there
