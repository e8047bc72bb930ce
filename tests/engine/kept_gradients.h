// Engines whose gradients are given by hand, on all placements and devices. Each is compared with one that
// was given the same gradients in the first place.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/resources.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {

struct KeptCase {
  std::string device;
  engine::Placement placement{};
  int64_t micro_batches = 1;
  bool speculate = false;
};

inline std::string name_of(const KeptCase& c) {
  return fmt::format("{}_{}_{}{}", c.device, placement_name(c.placement), c.micro_batches,
                     c.speculate ? "_guessed" : "");
}

class Kept : public ::testing::TestWithParam<KeptCase> {
 protected:
  std::unique_ptr<engine::Engine> make(const std::vector<engine::UnitSpec>& units = toy_units()) {
    engine::Config config;
    config.host_budget_bytes = 64 << 20;
    config.device_budget_bytes = 64 << 20;
    config.nvme = {"memory"};
    config.chunk_elements = 4096;
    config.poison = true;
    config.placement = GetParam().placement;
    config.gradient_accumulation = GetParam().micro_batches;
    config.speculate = GetParam().speculate;
    auto engine = std::make_unique<engine::Engine>(
        units, config, make_resources(units, config, {GetParam().device, "memory", 3}));
    toy_load(*engine);
    return engine;
  }

  using Visit = std::function<void(int unit, int segment, const engine::Unit&, const engine::Segment&)>;
  static void for_each(const engine::Engine& engine, const Visit& visit) {
    const auto& units = engine.layout().units;
    for (int u = 0; u < std::ssize(units); ++u) {
      for (int s = 0; s < std::ssize(units[u].segments); ++s) {
        if (units[u].trainable()) visit(u, s, units[u], units[u].segments[s]);
      }
    }
  }
  static std::vector<std::byte> gradient(const engine::Unit& unit, const engine::Segment& segment, int u,
                                         int s, int step) {
    const std::vector<float> seen(static_cast<size_t>(segment.elements), 0.5F);
    return toy_gradient_bytes(unit.dtype, seen, u, s, step, 0, 0);
  }
  /// To all segments, or to those that the other function takes.
  static void give(
      engine::Engine& engine, int step,
      const std::function<bool(int, int)>& takes = [](int, int) { return true; }) {
    engine.begin_pass({true, true});
    for_each(engine, [&](int u, int s, const engine::Unit& unit, const engine::Segment& segment) {
      if (takes(u, s)) engine.add_gradient(u, s, gradient(unit, segment, u, s, step), unit.dtype);
    });
  }
  static void step(engine::Engine& engine, int step) { engine.step(toy_groups(step)); }
  static void expect_alike(engine::Engine& a, engine::Engine& b, const char* what) {
    expect_same_bits(toy_contents(a), toy_contents(b), what);
  }
};

inline auto kept_cases() {
  using engine::Placement;
  return ::testing::Values(KeptCase{"host", Placement::host}, KeptCase{"host", Placement::half},
                           KeptCase{"host", Placement::nvme}, KeptCase{"host", Placement::nvme, 4},
                           KeptCase{"host", Placement::host, 1, true},
                           KeptCase{"host", Placement::nvme, 1, true}, KeptCase{"simulated", Placement::nvme},
                           KeptCase{"simulated", Placement::device});
}

}  // namespace overspill::testing
