// The arena of gathered weights: any three units can be leased at once, in whatever order, of models whose
// units differ much in size. That LeasePlaces divides it so is in memory_test.cc.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/resources.h"
#include "engine/schedule/plan.h"
#include "io/memory_store.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Lease;

engine::UnitSpec unit_of(int number, int64_t elements) {
  const std::string name = fmt::format("unit{}", number);
  return {name, optim::Format::exact, "BF16", {{name, {elements}, 0, {}}}};
}

/// Two large ones among small ones, of which a cell takes one, and a few that are smaller still.
std::vector<engine::UnitSpec> unlike_units() {
  std::vector<engine::UnitSpec> units;
  const std::vector<int64_t> small = {8192, 8000, 8192, 7000, 8192, 2000, 8192, 8000};
  const auto add = [&](int64_t elements) {
    units.push_back(unit_of(static_cast<int>(units.size()), elements));
  };
  add(66000);
  for (int64_t elements : small) add(elements);
  add(65600);
  for (int64_t elements : small) add(elements);
  return units;
}

/// With the smallest budget: what is read ahead lies wherever there is room.
Config smallest(Config config, const std::vector<engine::UnitSpec>& units, bool shares_host_memory) {
  const engine::Layout layout = engine::make_layout(units, config.chunk_elements, 0, 1);
  const engine::DeviceTraits device{.shares_host_memory = shares_host_memory};
  if (!shares_host_memory) {
    Config without = config;
    without.prefetch_units = 0;
    config.device_budget_bytes = make_plan(layout, without, device).gather_device_bytes;
    return config;
  }
  for (config.host_budget_bytes = 64 << 10;; config.host_budget_bytes += 4 << 10) {
    try {
      make_plan(layout, config, device);
      return config;
    } catch (const engine::BudgetError&) {
    }
  }
}

class Arena : public ::testing::TestWithParam<std::pair<const char*, int>> {};

TEST_P(Arena, HasRoomForAnyThreeUnits) {
  const auto& [device, prefetch] = GetParam();
  const std::vector<engine::UnitSpec> units = unlike_units();
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {std::filesystem::temp_directory_path()};
  config.job = fmt::format("arena-{}", ::getpid());
  config.threads = 1;
  config.chunk_elements = 16384;
  config.placement = engine::Placement::nvme;
  config.prefetch_units = prefetch;
  config.poison = true;
  if (prefetch > 2) config = smallest(config, units, std::string_view(device) == "host");
  engine::Resources resources = make_resources(units, config, {device, "memory", 1});
  resources.store = io::make_memory_store(64 << 20, {.seed = 3}, 65536);
  Engine engine(units, config, std::move(resources));
  toy_load(engine);
  std::vector<std::vector<float>> wanted;
  for (int u = 0; u < static_cast<int>(units.size()); ++u)
    wanted.push_back(toy_leased(engine, engine.acquire(u), u, 0));

  std::mt19937 draw(1);
  std::vector<std::pair<int, Lease>> held;
  for (int pass = 0; pass < 60; ++pass) {
    engine.begin_pass({false, false});
    for (int u = 0; u < static_cast<int>(units.size()); ++u) {
      while (held.size() > 2 || (!held.empty() && draw() % 4 == 0))
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(draw() % held.size()));
      try {
        held.emplace_back(u, engine.acquire(u));
      } catch (const engine::BudgetError& error) {
        FAIL() << "pass " << pass << ", beside " << held.size() << ": " << error.what();
      }
      for (const auto& [of, lease] : held) {
        ASSERT_EQ(toy_leased(engine, lease, of, 0), wanted[static_cast<size_t>(of)]) << "pass " << pass;
      }
    }
  }
  held.clear();
  engine.close();
}

INSTANTIATE_TEST_SUITE_P(Devices, Arena,
                         ::testing::Values(std::pair{"host", 0}, std::pair{"host", 2}, std::pair{"host", 5},
                                           std::pair{"simulated", 0}, std::pair{"simulated", 5}),
                         [](const auto& info) {
                           return fmt::format("{}_ahead_{}", info.param.first, info.param.second);
                         });

}  // namespace
}  // namespace overspill::testing
