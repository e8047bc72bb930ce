// Weights that are read in parts, and gradients that are given in parts: the numbers are those of whole ones,
// the budget has no room for whole ones, and what is broken off leaves nothing half done.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "io/memory_store.h"
#include "tests/engine/around_store.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Placement;
using engine::UnitSpec;

constexpr int64_t kPart = 12 << 10;  // bytes

std::vector<UnitSpec> in_parts(std::vector<UnitSpec> units = toy_units()) {
  for (UnitSpec& unit : units) unit.part_bytes = kPart;
  return units;
}

/// 2 MiB of weights.
UnitSpec large_unit() {
  UnitSpec unit;
  unit.name = "large";
  unit.segments.resize(1);
  unit.segments[0].name = "w";
  unit.segments[0].shape = {1024, 1024};
  return unit;
}

Config parts_config(Placement placement, int64_t micro_batches = 1) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {std::filesystem::temp_directory_path()};
  config.job = fmt::format("parts-{}", ::getpid());
  config.threads = 2;
  config.chunk_elements = 2048;
  config.gradient_accumulation = micro_batches;
  config.max_grad_norm = 1.0;
  config.placement = placement;
  config.poison = true;
  return config;
}

std::unique_ptr<Engine> parts_engine(const std::vector<UnitSpec>& units, const Config& config,
                                     const io::Faults& faults = {.seed = 3}) {
  engine::Resources resources = make_resources(units, config, {"host", "memory", 1});
  if (resources.store != nullptr) resources.store = io::make_memory_store(64 << 20, faults, 65536);
  return std::make_unique<Engine>(units, config, std::move(resources));
}

/// Sizes of parts, in elements, that add up to a segment's.
class Cuts {
 public:
  explicit Cuts(unsigned seed) : random_(seed) {}
  std::vector<int64_t> of(int64_t elements) {
    std::vector<int64_t> sizes;
    while (elements > 0) {
      sizes.push_back(std::min(elements, std::uniform_int_distribution<int64_t>(1, 5000)(random_)));
      elements -= sizes.back();
    }
    return sizes;
  }

 private:
  std::mt19937 random_;
};

/// A segment's weights as forward uses them, as fp32.
std::vector<float> read_in_parts(Engine& engine, int unit, int segment, Cuts& cuts) {
  const engine::Unit& u = engine.layout().units[unit];
  const int64_t elements = u.segments[segment].elements;
  std::vector<std::byte> bytes(static_cast<size_t>(elements * u.element_bytes));
  int64_t begin = 0;
  for (const int64_t size : cuts.of(elements)) {
    engine.read_part(unit, segment, begin,
                     std::span(bytes).subspan(static_cast<size_t>(begin * u.element_bytes),
                                              static_cast<size_t>(size * u.element_bytes)));
    begin += size;
  }
  return toy_widened(u.dtype, bytes.data(), static_cast<size_t>(elements));
}

void give_in_parts(Engine& engine, int unit, int segment, const std::vector<std::byte>& gradient,
                   Cuts& cuts) {
  const engine::Unit& u = engine.layout().units[unit];
  const int64_t width = std::ssize(gradient) / u.segments[segment].elements;
  engine::PartedGradient parts = engine.begin_gradient(unit, segment, u.dtype);
  size_t begin = 0;
  for (const int64_t size : cuts.of(u.segments[segment].elements)) {
    parts.add(std::span(gradient).subspan(begin, static_cast<size_t>(size * width)));
    begin += static_cast<size_t>(size * width);
  }
  parts.finish();
}

/// toy_step() of an engine whose weights are all read in parts.
engine::StepResult step_in_parts(Engine& engine, int step, int micro_batches, Cuts& cuts) {
  const auto& units = engine.layout().units;
  const std::vector<optim::Hyper> groups = toy_groups(step, units[0].optimizer);
  engine.expect_step(groups);
  for (int micro = 0; micro < micro_batches; ++micro) {
    engine.begin_pass({true, true});
    for (int u = 0; u < std::ssize(units); ++u) {
      for (int s = 0; s < std::ssize(units[u].segments); ++s) (void)read_in_parts(engine, u, s, cuts);
    }
    for (int u = static_cast<int>(std::ssize(units)) - 1; u >= 0; --u) {
      if (!units[u].trainable()) continue;
      for (int s = 0; s < std::ssize(units[u].segments); ++s) {
        if (toy_skips(u, s, step, 0)) continue;
        const std::vector<float> seen = read_in_parts(engine, u, s, cuts);
        give_in_parts(engine, u, s, toy_gradient_bytes(units[u].dtype, seen, u, s, step, micro, 0), cuts);
      }
    }
  }
  return engine.step(groups);
}

struct Case {
  Placement placement;
  int micro_batches;
  bool speculate;
};

class Parts : public ::testing::TestWithParam<Case> {};

TEST_P(Parts, ComputeTheSameBits) {
  const auto [placement, micro_batches, speculate] = GetParam();
  Config config = parts_config(placement, micro_batches);
  config.speculate = speculate;
  const auto engine = parts_engine(in_parts(), config, {.seed = 5, .reorder = true, .short_transfer = 0.2});
  EXPECT_EQ(engine->plan().gather_host_bytes, 0);
  EXPECT_EQ(engine->plan().part_chunks > 0, placement != Placement::host);
  toy_load(*engine);
  Cuts cuts(7);
  std::vector<engine::StepResult> results;
  for (int step = 0; step < 6; ++step) results.push_back(step_in_parts(*engine, step, micro_batches, cuts));
  expect_same_bits(toy_contents(*engine), toy_reference(6, micro_batches, results), "weights and states");
}

INSTANTIATE_TEST_SUITE_P(All, Parts,
                         ::testing::Values(Case{Placement::host, 1, false}, Case{Placement::half, 1, false},
                                           Case{Placement::nvme, 1, false}, Case{Placement::nvme, 3, false},
                                           Case{Placement::half, 3, false}, Case{Placement::host, 2, false},
                                           Case{Placement::nvme, 1, true}, Case{Placement::half, 1, true}),
                         [](const auto& info) {
                           return fmt::format("{}_{}{}", placement_name(info.param.placement),
                                              info.param.micro_batches,
                                              info.param.speculate ? "_guessed" : "");
                         });

// ---- room

TEST(PartsPlan, ABudgetThatNoUnitFitsIntoDoes) {
  std::vector<UnitSpec> units = {large_unit()};
  Config config = parts_config(Placement::nvme);
  config.host_budget_bytes = 512 << 10;  // of 2 MiB of weights
  EXPECT_THROW(parts_engine(units, config), engine::BudgetError);
  units[0].part_bytes = 64 << 10;
  const auto engine = parts_engine(units, config);
  EXPECT_LE(engine->plan().part_chunks * engine->plan().part_chunk_bytes, (64 << 10) + 2 * 4096);
  std::vector<std::byte> part(64 << 10);
  engine->read_part(0, 0, 512, part);
  EXPECT_LE(engine->stats().host_peak_bytes, config.host_budget_bytes);
}

// ---- what is broken off

TEST(PartsBrokenOff, AGradientThatDidNotEndIsAbsent) {
  for (const Placement placement : {Placement::host, Placement::nvme}) {
    SCOPED_TRACE(placement_name(placement));
    const auto engine = parts_engine(in_parts(), parts_config(placement));
    toy_load(*engine);
    const engine::Unit& unit = engine->layout().units[0];
    const auto elements = static_cast<size_t>(unit.segments[0].elements);
    const std::vector<std::byte> ones =
        toy_gradient_bytes(unit.dtype, std::vector<float>(elements, 1.0F), 0, 0, 1, 0, 0);
    engine->begin_pass({true, true});
    {
      engine::PartedGradient parts = engine->begin_gradient(0, 0, unit.dtype);
      parts.add(std::span(ones).first(ones.size() / 2));
      EXPECT_THROW(parts.finish(), std::invalid_argument);
      EXPECT_THROW(parts.add(ones), std::invalid_argument) << "more than is left";
    }
    EXPECT_FALSE(engine->has_gradient(0, 0));
    engine->add_gradient(0, 0, ones, unit.dtype);
    EXPECT_TRUE(engine->has_gradient(0, 0));
    std::vector<float> found(elements);
    engine->read_state(0, 0, "grad", found);
    expect_same_bits(found, toy_widened(unit.dtype, ones.data(), elements), "the whole one that follows");
    { const engine::PartedGradient parts = engine->begin_gradient(0, 0, unit.dtype); }
    EXPECT_TRUE(engine->has_gradient(0, 0)) << "no part was given";
    const auto in_part = [&] {
      engine::PartedGradient parts = engine->begin_gradient(0, 0, unit.dtype);
      parts.add(std::span(ones).first(ones.size() - 8));
      return parts;
    };
    { const engine::PartedGradient parts = in_part(); }
    EXPECT_FALSE(engine->has_gradient(0, 0)) << "added to it in part";
    EXPECT_THROW(engine->step(toy_groups(1)), std::invalid_argument);
    engine->clear_gradients();
    {
      const engine::PartedGradient late = in_part();
      engine->clear_gradients();
      engine->add_gradient(0, 0, ones, unit.dtype);
    }
    EXPECT_TRUE(engine->has_gradient(0, 0)) << "it is another one";
    engine->step(toy_groups(1));
  }
}

TEST(PartsBrokenOff, NoOtherOptimizerForgetsIt) {
  std::vector<UnitSpec> units = in_parts();
  for (size_t u = 0; u < units.size(); ++u) {
    for (engine::SegmentSpec& segment : units[u].segments) segment.group = u == 0 ? 0 : 1;
  }
  constexpr engine::GroupRange kFirst{0, 1};
  constexpr engine::GroupRange kOthers{1, 2};
  Config config = parts_config(Placement::nvme, 2);
  config.max_grad_norm = 0;  // it is of all gradients
  const auto engine = parts_engine(units, config);
  toy_load(*engine);
  const engine::Unit& unit = engine->layout().units[0];
  const auto elements = static_cast<size_t>(unit.segments[0].elements);
  const std::vector<std::byte> ones =
      toy_gradient_bytes(unit.dtype, std::vector<float>(elements, 1.0F), 0, 0, 1, 0, 0);
  engine->begin_pass({true, true});
  engine->add_gradient(0, 0, ones, unit.dtype);
  {
    engine::PartedGradient parts = engine->begin_gradient(0, 0, unit.dtype);
    parts.add(std::span(ones).first(ones.size() / 2));
  }
  const std::vector<optim::Hyper> groups = toy_groups(1);
  engine->clear_gradients(kOthers);
  EXPECT_NO_THROW(engine->step(std::span(groups).subspan(1, 1), kOthers)) << "it has nothing to do with it";
  EXPECT_THROW(engine->step(std::span(groups).first(1), kFirst), std::invalid_argument);
  engine->clear_gradients(kFirst);
  EXPECT_NO_THROW(engine->step(std::span(groups).first(1), kFirst));
}

TEST(PartsOrder, UpdatesFollowTheOrderInWhichPartsAreRead) {
  const auto engine = parts_engine(in_parts(), parts_config(Placement::host));
  toy_load(*engine);
  const auto& units = engine->layout().units;
  engine->begin_pass({true, true});
  std::vector<int32_t> expected;
  for (int u = static_cast<int>(std::ssize(units)) - 1; u >= 0; --u) {
    std::vector<std::byte> first(static_cast<size_t>(units[u].element_bytes));
    engine->read_part(u, 0, 0, first);
    if (units[u].trainable()) expected.push_back(u);
  }
  for (int32_t u : expected) {
    const std::vector<float> seen(static_cast<size_t>(units[u].segments[0].elements), 0.5F);
    engine->add_gradient(u, 0, toy_gradient_bytes(units[u].dtype, seen, u, 0, 1, 0, 0), units[u].dtype);
  }
  engine->record_journal(true);
  engine->step(toy_groups(1));
  engine->synchronize();
  std::vector<int32_t> scheduled;
  for (const engine::JournalEntry& entry : engine->take_journal()) {
    const bool again = !scheduled.empty() && scheduled.back() == entry.unit;
    if (entry.happening == engine::Happening::scheduled && !again) scheduled.push_back(entry.unit);
  }
  EXPECT_EQ(scheduled, expected);
}

TEST(PartsBrokenOff, AClosedEngineTakesNoMore) {
  const auto engine = parts_engine(in_parts(), parts_config(Placement::host));
  toy_load(*engine);
  const engine::Unit& unit = engine->layout().units[0];
  const std::vector<std::byte> all(static_cast<size_t>(unit.segments[0].elements * unit.element_bytes));
  engine::PartedGradient parts = engine->begin_gradient(0, 0, unit.dtype);
  engine->close();
  EXPECT_THROW(parts.add(all), std::invalid_argument);
  EXPECT_THROW(parts.finish(), std::invalid_argument);
}

TEST(PartsBrokenOff, ReadAheadIsForgottenByAStep) {
  const auto engine = parts_engine(in_parts(), parts_config(Placement::nvme));
  toy_load(*engine);
  Cuts cuts(3);
  std::vector<engine::StepResult> results;
  for (int step = 0; step < 4; ++step) {
    results.push_back(step_in_parts(*engine, step, 1, cuts));
    std::vector<std::byte> first(64);  // what follows is read ahead, and nobody asks for it
    for (int u = 0; u < std::ssize(engine->layout().units); ++u) {
      if (engine->layout().units[u].segments[0].elements >= 32)
        engine->read_part(
            u, 0, 0,
            std::span(first).first(static_cast<size_t>(32 * engine->layout().units[u].element_bytes) / 2));
    }
  }
  expect_same_bits(toy_contents(*engine), toy_reference(4, 1, results), "weights and states");
}

/// Keeps the first extent that is read.
class Remembers final : public AroundStore {
 public:
  Remembers(std::unique_ptr<io::Store> store, io::Extent& first)
      : AroundStore(std::move(store)), first_(first) {}
  void submit(io::Transfer& transfer) override {
    if (transfer.kind == io::Transfer::Kind::read && first_.empty()) first_ = transfer.extent;
    AroundStore::submit(transfer);
  }

 private:
  io::Extent& first_;
};

TEST(PartsBrokenOff, ADamagedWeightFailsTheEngine) {
  std::vector<UnitSpec> units = {large_unit()};
  units[0].part_bytes = kPart;
  const Config config = parts_config(Placement::nvme);
  engine::Resources resources = make_resources(units, config, {"host", "memory", 1});
  auto store = io::make_memory_store(64 << 20, {.seed = 3}, 65536);
  io::MemoryStore* const memory = store.get();
  io::Extent first;
  resources.store = std::make_unique<Remembers>(std::move(store), first);
  Engine engine(units, config, std::move(resources));
  const std::vector<std::byte> ones(2 << 20, std::byte{0x3F});
  engine.load_weight(0, 0, ones, "BF16");
  std::vector<std::byte> part(64);
  engine.read_part(0, 0, 0, part);
  EXPECT_EQ(part[0], std::byte{0x3F});
  ASSERT_FALSE(first.empty());
  memory->flip_bit(first, 5);
  engine.read_part(0, 0, 1 << 19, part);  // what was read of the beginning makes way
  EXPECT_THROW(engine.read_part(0, 0, 0, part), engine::EngineFailed);
}

// ---- refused

TEST(PartsRefused, WhatIsNoPart) {
  const auto engine = parts_engine(in_parts(), parts_config(Placement::nvme));
  toy_load(*engine);
  const int64_t elements = engine->layout().units[0].segments[0].elements;
  std::vector<std::byte> out(64);
  EXPECT_THROW(engine->read_part(0, 0, elements - 1, out), std::invalid_argument);
  EXPECT_THROW(engine->read_part(0, 0, -1, out), std::invalid_argument);
  EXPECT_THROW(engine->read_part(0, 0, 0, std::span(out).first(63)), std::invalid_argument);
  EXPECT_THROW((void)engine->acquire(0), std::invalid_argument) << "no lease has it whole";
  EXPECT_THROW((void)engine->begin_gradient(0, 0, "F64"), std::invalid_argument);
  const auto whole = parts_engine(toy_units(), parts_config(Placement::nvme));
  EXPECT_THROW(whole->read_part(0, 0, 0, out), std::invalid_argument);
}

}  // namespace
}  // namespace overspill::testing
