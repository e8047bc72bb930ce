// Every optimizer in every format: weights and states equal the scalar reference, bit for bit, wherever they
// live, whoever updates them, guessed or not; a run that was saved and opened equals one that never stopped.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "engine/resources.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::Config;
using engine::Engine;
using engine::Placement;

constexpr int kSteps = 6;
constexpr uint64_t kSeed = 99;

struct Way {
  Placement placement = Placement::host;
  int threads = 1;
  int micro_batches = 1;
  const char* speculation = "";  // "hits": nothing is clipped; "misses": every step is
  int64_t chunk_elements = 4096;
  const char* device = "host";
};

/// Everything trainable lives on a simulated device, and is updated there.
Way on_the_device(int micro_batches = 1, int64_t chunk_elements = 4096) {
  return {Placement::device, 2, micro_batches, "", chunk_elements, "simulated"};
}

Way way_to(Placement placement) {
  return placement == Placement::device ? on_the_device() : Way{placement, 2};
}

std::string text_of(const Way& way) {
  return fmt::format("{}, {} threads, {} micro-batches, speculation {}, chunks of {}",
                     placement_name(way.placement), way.threads, way.micro_batches, way.speculation,
                     way.chunk_elements);
}

class Family : public ::testing::TestWithParam<std::tuple<int, optim::Format>> {
 protected:
  void SetUp() override {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  static ToyKind kind() {
    const auto [optimizer, format] = GetParam();
    return {optim::Optimizer{static_cast<uint8_t>(optimizer)}, format};
  }

  std::unique_ptr<Engine> make(const Way& way, const std::string& backend = "memory",
                               const ToyKind& kind = Family::kind()) {
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = {folder_};
    config.job = fmt::format("family{}", made_++);
    config.threads = way.threads;
    config.gradient_accumulation = way.micro_batches;
    config.speculate = way.speculation[0] != '\0';
    config.max_grad_norm = way.speculation == std::string("hits") ? 1e9 : 1.0;
    config.chunk_elements = way.chunk_elements;
    config.placement = way.placement;
    config.poison = true;
    config.rounding_seed = kSeed;
    return std::make_unique<Engine>(toy_units(kind), config,
                                    make_resources(toy_units(kind), config, {way.device, backend, 3}));
  }

  /// After kSteps of these results; ways that clipped alike share it.
  const std::vector<float>& reference(int micro_batches, const std::vector<engine::StepResult>& results) {
    std::vector<double> clips;
    for (const engine::StepResult& result : results) clips.push_back(result.clip);
    auto [at, is_new] = references_.try_emplace({micro_batches, clips});
    if (is_new) at->second = toy_reference(kSteps, micro_batches, results, 1, kind(), kSeed);
    return at->second;
  }

  fs::path folder_ = fs::temp_directory_path() / fmt::format("test-of-overspill-family-test-{}", ::getpid());
  int made_ = 0;
  std::map<std::pair<int, std::vector<double>>, std::vector<float>> references_;
};

TEST_P(Family, EqualsTheScalarReferenceEverywhere) {
  std::vector<Way> ways;
  for (const Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
    for (const int threads : {1, 3}) ways.push_back({placement, threads});
    ways.push_back({placement, 2, 3});
    ways.push_back({placement, 2, 1, "", 1 << 20});
    if (placement == Placement::host) continue;
    for (const char* speculation : {"hits", "misses"}) ways.push_back({placement, 2, 1, speculation});
  }
  ways.push_back(on_the_device());
  ways.push_back(on_the_device(3));
  ways.push_back(on_the_device(1, 1 << 20));
  for (const Way& way : ways) {
    auto engine = make(way);
    if (way.placement == Placement::device) {
      EXPECT_EQ(engine->plan().units_on_device(), 5) << "all but the frozen one";
    }
    toy_load(*engine);
    std::vector<engine::StepResult> results;
    for (int step = 0; step < kSteps; ++step) {
      results.push_back(toy_step(*engine, step, way.micro_batches, 0).result);
      EXPECT_FALSE(results.back().skipped);
      EXPECT_EQ(results.back().clip < 1, way.speculation != std::string("hits")) << text_of(way);
    }
    expect_same_bits(toy_contents(*engine), reference(way.micro_batches, results), text_of(way));
    const engine::Stats stats = engine->stats();
    const bool guesses = way.speculation[0] != '\0' && engine->plan().states_nvme_bytes > 0;
    if (!guesses) {
      EXPECT_EQ(stats.guesses_taken + stats.guesses_dropped, 0) << text_of(way);
    }
    if (way.speculation != std::string("hits")) {
      EXPECT_EQ(stats.guesses_taken, 0) << text_of(way);
    }
  }
}

TEST_P(Family, GoingOnFromACheckpointIsGoingOn) {
  constexpr Placement kAll[] = {Placement::host, Placement::half, Placement::nvme, Placement::device};
  for (const Placement placement : kAll) {
    auto first = make(way_to(placement), "auto");
    toy_load(*first);
    for (int step = 0; step < 3; ++step) toy_step(*first, step, 1, 0);
    const fs::path saved = folder_ / fmt::format("saved-{}", static_cast<int>(placement));
    first->save(saved, "{}");
    const auto at_three = toy_contents(*first);
    for (int step = 3; step < kSteps; ++step) toy_step(*first, step, 1, 0);
    const auto at_end = toy_contents(*first);
    for (const Placement other : kAll) {
      // Other chunks too: a component's scales lie behind its codes, wherever it is cut.
      for (const int64_t chunk : {int64_t{4096}, int64_t{8192}, int64_t{1} << 20}) {
        Way way = way_to(other);
        way.chunk_elements = chunk;
        auto second = make(way, "auto");
        second->load(saved);
        expect_same_bits(toy_contents(*second), at_three, "opened: " + text_of(way));
        if (chunk != 4096) continue;  // the norm's last bits come from the sums of chunks
        for (int step = 3; step < kSteps; ++step) toy_step(*second, step, 1, 0);
        expect_same_bits(toy_contents(*second), at_end, "went on: " + text_of(way));
      }
    }
  }
}

/// Masters, states and counts of updates of one engine, one segment after the other, into another.
void hand_over(Engine& from, Engine& to) {
  for (size_t u = 0; u < from.layout().units.size(); ++u) {
    const engine::Unit& unit = from.layout().units[u];
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      const auto index = static_cast<int32_t>(u);
      const auto segment = static_cast<int32_t>(s);
      std::vector<float> values(static_cast<size_t>(unit.segments[s].elements));
      from.read_weight(index, segment, std::as_writable_bytes(std::span(values)), "F32");
      to.load_weight(index, segment, std::as_bytes(std::span(values)), "F32");
      if (!unit.trainable()) continue;
      for (const optim::ComponentSpec& spec : unit.components()) {
        if (spec.role != optim::Role::state) continue;
        from.read_state(index, segment, spec.name, values);
        to.write_state(index, segment, spec.name, values);
      }
      to.set_updates_of(index, segment, from.updates_of(index, segment));
    }
  }
}

TEST_P(Family, GoingOnFromStatesThatWereReadIsGoingOn) {
  for (const Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
    auto first = make({placement, 2});
    toy_load(*first);
    for (int step = 0; step < 3; ++step) toy_step(*first, step, 1, 0);
    auto second = make({Placement::half, 1});
    toy_load(*second);
    toy_step(*second, 7, 1, 0);  // what was there does not stay
    hand_over(*first, *second);
    expect_same_bits(toy_contents(*second), toy_contents(*first), "handed over");
    for (int step = 3; step < kSteps; ++step) {
      toy_step(*first, step, 1, 0);
      toy_step(*second, step, 1, 0);
    }
    expect_same_bits(toy_contents(*second), toy_contents(*first), "went on");
  }
}

TEST_P(Family, StatesAreWrittenWholeAndByTheirNames) {
  auto engine = make({});
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  const auto before = toy_contents(*engine);
  const std::vector<float> values(97 * 64), fewer(5);
  for (const char* name : {"lo", "hi", "exp_avg", "grad", ""})
    EXPECT_THROW(engine->write_state(0, 0, name, values), std::invalid_argument) << name;
  for (const optim::ComponentSpec& spec : engine->layout().units[0].components())
    EXPECT_THROW(engine->write_state(0, 0, spec.name, fewer), std::invalid_argument) << spec.name;
  EXPECT_THROW(engine->set_updates_of(0, 0, -1), std::invalid_argument);
  EXPECT_EQ(engine->updates_of(0, 0), 1);
  expect_same_bits(toy_contents(*engine), before, "refused");
}

TEST_P(Family, ACheckpointOfAnotherKindIsRefusedByName) {
  auto own = make({});
  toy_load(*own);
  toy_step(*own, 0, 1, 0);
  own->save(folder_ / "saved", "{}");
  const ToyKind mine = kind();
  const auto refusal = [&](const ToyKind& other) {
    auto engine = make({}, "memory", other);
    toy_load(*engine);
    const auto before = toy_contents(*engine);
    try {
      engine->load(folder_ / "saved");
    } catch (const engine::CheckpointError& error) {
      expect_same_bits(toy_contents(*engine), before, "refused");
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  ToyKind other = mine;
  other.optimizer = optim::optimizer_named(optim::name(mine.optimizer) == "lion" ? "sgd" : "lion");
  EXPECT_NE(refusal(other).find(fmt::format("optimizer of unit embed is {} there, {} here",
                                            optim::name(mine.optimizer), optim::name(other.optimizer))),
            std::string::npos)
      << refusal(other);
  other = mine;
  other.format = *mine.format == optim::Format::compact ? optim::Format::exact : optim::Format::compact;
  const std::string what = refusal(other);
  const bool named =
      what.find(fmt::format("format of unit embed is {} there, {} here", optim::name(*mine.format),
                            optim::name(*other.format))) != std::string::npos ||
      what.find("dtype of unit embed is") != std::string::npos;
  EXPECT_TRUE(named) << what;
}

TEST_P(Family, MergesToItsMasterAndToWhatForwardUses) {
  auto engine = make({Placement::half, 2}, "auto");
  toy_load(*engine);
  for (int step = 0; step < 2; ++step) toy_step(*engine, step, 1, 0);
  engine->save(folder_ / "saved", "{}");
  for (const char* dtype : {"fp32", "bf16"}) {
    const fs::path out = folder_ / dtype;
    engine::merge_checkpoint(folder_ / "saved", out, {.dtype = dtype}, nullptr, nullptr);
    std::vector<float> master(97 * 64);
    engine->read_weight(0, 0, std::as_writable_bytes(std::span(master)), "F32");
    // The tensors of safetensors lie in the order of the header; the largest offsets are not needed here:
    // embed.weight is found by its bytes.
    std::vector<std::byte> wanted(master.size() * (dtype == std::string("fp32") ? 4 : 2));
    for (size_t i = 0; i < master.size(); ++i) {
      if (dtype == std::string("fp32")) {
        std::memcpy(wanted.data() + i * 4, &master[i], 4);
        continue;
      }
      uint16_t bits = 0;
      const engine::Unit& unit = engine->layout().units[0];
      if (unit.dtype == "BF16") {
        const engine::Lease lease = engine->acquire(0);
        std::memcpy(&bits, lease.data() + i * 2, 2);
      } else {
        uint32_t wide = 0;
        std::memcpy(&wide, &master[i], 4);
        bits = static_cast<uint16_t>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
      }
      std::memcpy(wanted.data() + i * 2, &bits, 2);
    }
    std::ifstream file(out / "model.safetensors", std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const std::string_view part(reinterpret_cast<const char*>(wanted.data()), wanted.size());
    EXPECT_NE(text.find(part), std::string::npos) << dtype;
  }
}

TEST_P(Family, AWeightWrittenInPlaceIsTheMaster) {
  for (const Placement placement : {Placement::host, Placement::nvme}) {
    auto engine = make({placement, 1});
    toy_load(*engine);
    toy_step(*engine, 0, 1, 0);
    const engine::Unit& unit = engine->layout().units[0];
    std::vector<std::byte> bytes(static_cast<size_t>(unit.segments[0].elements * unit.element_bytes));
    engine->read_weight(0, 0, bytes, unit.dtype);
    std::swap_ranges(bytes.begin(), bytes.begin() + unit.element_bytes, bytes.begin() + unit.element_bytes);
    for (const bool loaded : {false, true}) {
      if (loaded) {
        engine->load_weight(0, 0, bytes, unit.dtype);
      } else {
        engine->written(0, 0, bytes);
      }
      std::vector<std::byte> again(bytes.size());
      engine->read_weight(0, 0, again, unit.dtype);
      EXPECT_EQ(again, bytes);
      std::vector<float> master(static_cast<size_t>(unit.segments[0].elements));
      engine->read_weight(0, 0, std::as_writable_bytes(std::span(master)), "F32");
      const engine::Lease lease = engine->acquire(0);
      expect_same_bits(master, toy_leased(*engine, lease, 0, 0), "master");
      toy_step(*engine, 1, 1, 0);
    }
  }
}

TEST_P(Family, WhatIsWrittenIntoAnOlderLeaseIsWhatTheNextOneHas) {
  for (const Placement placement : {Placement::host, Placement::nvme}) {
    auto engine = make({placement, 1});
    toy_load(*engine);
    const engine::Unit& unit = engine->layout().units[0];
    std::vector<std::byte> bytes(static_cast<size_t>(unit.segments[0].elements * unit.element_bytes));
    const engine::Lease older = engine->acquire(0);
    engine->read_weight(0, 0, bytes, unit.dtype);
    engine->load_weight(0, 0, bytes, unit.dtype);
    engine->acquire(0);  // of the weight that was loaded
    std::byte* leased = older.data() + unit.segments[0].begin * unit.element_bytes;
    std::swap_ranges(leased, leased + unit.element_bytes, leased + unit.element_bytes);
    engine->written(0, 0, {leased, bytes.size()});
    std::vector<std::byte> again(bytes.size());
    engine->read_weight(0, 0, again, unit.dtype);
    EXPECT_EQ(again, std::vector<std::byte>(leased, leased + bytes.size()));
    EXPECT_EQ(toy_leased(*engine, engine->acquire(0), 0, 0), toy_leased(*engine, older, 0, 0));
  }
}

TEST_P(Family, WhatBelongsToAnotherOptimizerIsRefused) {
  auto engine = make({});
  toy_load(*engine);
  const auto before = toy_contents(*engine);
  const auto other = optim::optimizer_named(optim::name(kind().optimizer) == "lion" ? "sgd" : "lion");
  EXPECT_THROW(engine->step(toy_groups(0, other)), std::invalid_argument);
  EXPECT_THROW(engine->expect_step(toy_groups(0, other)), std::invalid_argument);
  EXPECT_THROW(engine->start_states(toy_groups(0, other)), std::invalid_argument);
  std::vector<float> values(97 * 64);
  for (const char* name : {"lo", "hi", "exp_avg", ""})
    EXPECT_THROW(engine->read_state(0, 0, name, values), std::invalid_argument) << name;
  expect_same_bits(toy_contents(*engine), before, "refused");
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<int, optim::Format>>& info) {
  const auto [optimizer, format] = info.param;
  return fmt::format("{}_{}", optim::name(optim::Optimizer{static_cast<uint8_t>(optimizer)}),
                     optim::name(format));
}

INSTANTIATE_TEST_SUITE_P(All, Family,
                         ::testing::Combine(::testing::Range(0, optim::kOptimizerCount),
                                            ::testing::Values(optim::Format::fp32, optim::Format::exact,
                                                              optim::Format::fp16, optim::Format::compact,
                                                              optim::Format::eight_bit)),
                         name_of);

TEST(FamilyBytes, AreWhatTheTableOfFormatsSays) {
  const auto bytes_of = [](const ToyKind& kind) {
    const engine::Layout layout = engine::make_layout(toy_units(kind), 512 << 10, 0, 1);
    Config config;
    config.host_budget_bytes = 64 << 20;
    const engine::Plan plan = engine::make_plan(layout, config, {true});
    for (const auto& holding : plan.holdings) {
      if (holding.name != "frozen") return holding.parameter_bytes;
    }
    return 0.0;
  };
  using optim::Format;
  const auto adam = optim::optimizer_named("adam");
  EXPECT_EQ(bytes_of({adam, Format::fp32}), 12);
  EXPECT_EQ(bytes_of({adam, Format::exact}), 12);
  EXPECT_EQ(bytes_of({adam, Format::fp16}), 14);
  EXPECT_EQ(bytes_of({adam, Format::compact}), 8);
  EXPECT_EQ(bytes_of({adam, Format::eight_bit}), 5.03125);
  EXPECT_EQ(bytes_of({optim::optimizer_named("lion"), Format::compact}), 6);
  EXPECT_EQ(bytes_of({optim::optimizer_named("sgd"), Format::exact}), 4);
}

TEST(FamilyBytes, NoTwoSegmentsShareAScale) {
  const engine::Layout layout =
      engine::make_layout(toy_units({optim::optimizer_named("adam"), optim::Format::eight_bit}), 4096, 1, 2);
  for (const engine::Unit& unit : layout.units) {
    for (const engine::Segment& segment : unit.segments) {
      if (unit.trainable()) {
        EXPECT_EQ(segment.begin % optim::kScaleBlock, 0) << segment.name;
      }
    }
  }
  for (const engine::Chunk& chunk : layout.chunks) {
    EXPECT_EQ(layout.global_begin(chunk) % optim::kScaleBlock, 0);
  }
}

}  // namespace
}  // namespace overspill::testing
