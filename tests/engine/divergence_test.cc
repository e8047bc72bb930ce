// Ranks whose control flow differs: they skip other layers, evaluate alone, have other budgets and
// placements. No run hangs, none reads a stale weight, and each gives the bits of the scalar reference, which
// overlaps nothing. OVERSPILL_SEED=<seed> repeats one run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <thread>

#include "tests/engine/rank_world.h"
#include "tests/watched.h"

namespace overspill::testing {
namespace {

using engine::Engine;
using engine::Placement;

constexpr int kStepsOfARun = 4;
constexpr uint64_t kSeeds = 50;  // of a test
constexpr uint64_t kTried = kWatched ? 10 : kSeeds;

/// What a seed decides.
struct Run {
  uint64_t seed;
  int world;
  int stage;
  int micro_batches;

  explicit Run(uint64_t from) : seed(from) {
    std::mt19937_64 random(seed);
    world = 2 + static_cast<int>(random() % 3);
    stage = static_cast<int>(random() % 4);
    micro_batches = random() % 4 == 0 ? 2 : 1;
  }

  std::mt19937_64 of_rank(int rank) const {
    return std::mt19937_64(seed * 64 + static_cast<uint64_t>(rank) + 1);
  }

  RankOptions options(int rank) const {
    std::mt19937_64 random = of_rank(rank);
    RankOptions out{.stage = stage, .micro_batches = micro_batches};
    const Placement placements[] = {Placement::host, Placement::half, Placement::nvme, Placement::device};
    const int64_t prefetch[] = {4, 6, 100};
    out.placement = placements[random() % 4];
    out.prefetch_units = prefetch[random() % 3];
    out.host_budget_bytes = (6 + static_cast<int64_t>(random() % 60)) << 20;
    if (random() % 2 == 0) out.device = "simulated";
    out.reaches = out.device == "simulated" && random() % 2 == 0;
    return out;
  }

  /// Layers that a rank does not use in a step; and now and then one parameter that gets no gradient.
  bool skips_unit(int unit, int step, int rank) const {
    std::mt19937_64 random((seed * 100 + static_cast<uint64_t>(step)) * 100 +
                           static_cast<uint64_t>(rank * 10 + unit));
    return random() % 3 == 0;
  }
  bool absent(int unit, int segment, int step, int rank) const {
    std::mt19937_64 random(seed * 7 + static_cast<uint64_t>(step * 1000 + unit * 100 + segment * 10 + rank));
    return skips_unit(unit, step, rank) || random() % 8 == 0;
  }
};

void dawdle(std::mt19937_64& random) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
}

/// One rank's whole run; throws where it reads a weight that is not the reference's.
void take_part(const Run& run, int rank, std::unique_ptr<engine::Communicator> ranks,
               std::vector<engine::StepResult>& results, std::vector<float>& contents) {
  std::mt19937_64 random = run.of_rank(rank);
  const auto engine = toy_rank(run.options(rank), std::move(ranks));
  toy_load(*engine);
  ToyReference reference(toy_units());
  const auto units = static_cast<int>(engine->layout().units.size());
  const auto look = [&](int unit) {
    const engine::Lease lease = engine->acquire(unit);
    for (size_t s = 0; s < engine->layout().units[unit].segments.size(); ++s) {
      const auto segment = static_cast<int>(s);
      if (toy_leased(*engine, lease, unit, segment) != reference.seen(unit, segment))
        throw std::runtime_error(fmt::format("rank {} reads a wrong weight of unit {}", rank, unit));
    }
  };
  for (int step = 0; step < kStepsOfARun; ++step) {
    if (random() % 3 == 0) {  // evaluates, and nobody else does
      engine->begin_pass({false, false});
      for (int n = static_cast<int>(random() % 12); n > 0; --n) look(static_cast<int>(random() % units));
    }
    for (int micro = 0; micro < run.micro_batches; ++micro) {
      engine->begin_pass({true, true});
      for (int u = 0; u < units; ++u) {
        if (run.skips_unit(u, step, rank)) continue;
        look(u);
        dawdle(random);
      }
      for (int u = units - 1; u >= 0; --u) {
        if (run.skips_unit(u, step, rank) || !engine->layout().units[u].trainable()) continue;
        const engine::Lease lease = engine->acquire(u);
        for (int s = static_cast<int>(engine->layout().units[u].segments.size()) - 1; s >= 0; --s) {
          if (run.absent(u, s, step, rank)) continue;
          toy_add_gradient_always(*engine, toy_leased(*engine, lease, u, s), u, s, step, micro, rank);
        }
        dawdle(random);
      }
    }
    results.push_back(engine->step(toy_groups(step)));
    reference.advance(
        step, run.micro_batches, results.back().clip,
        [&](int u, int s, int r) { return run.absent(u, s, step, r); }, run.world);
  }
  contents = toy_contents(*engine);
  if (contents != reference.contents()) throw std::runtime_error("the contents are not the reference's");
}

void expect_right(uint64_t seed) {
  const Run run(seed);
  SCOPED_TRACE(fmt::format("OVERSPILL_SEED={} world {} stage {} micro-batches {}", seed, run.world, run.stage,
                           run.micro_batches));
  std::vector<std::vector<engine::StepResult>> results(static_cast<size_t>(run.world));
  std::vector<std::vector<float>> contents(static_cast<size_t>(run.world));
  const auto errors = on_ranks(run.world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    take_part(run, rank, std::move(ranks), results[rank], contents[rank]);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  for (int rank = 1; rank < run.world && !::testing::Test::HasFailure(); ++rank)
    EXPECT_EQ(digest(contents[rank], results[rank]), digest(contents[0], results[0])) << "rank " << rank;
}

class Divergence : public ::testing::TestWithParam<int> {};

TEST_P(Divergence, NeverHangsAndNeverDrifts) {
  if (const char* seed = std::getenv("OVERSPILL_SEED")) return expect_right(std::strtoull(seed, nullptr, 10));
  const uint64_t first = static_cast<uint64_t>(GetParam()) * kSeeds;
  for (uint64_t i = 0; i < kTried && !HasFailure(); ++i) expect_right(first + i);
}

INSTANTIATE_TEST_SUITE_P(Seeds, Divergence, ::testing::Range(0, 4));

/// Two ranks that use different units, and a pool too small for both: nobody can go on, and both are told.
TEST(Divergence, OfGradientsWithoutRoomIsAnError) {
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({.stage = 2, .prefetch_units = 0}, std::move(ranks));
    toy_load(*engine);
    engine->begin_pass({true, true});
    const int of_rank[2][3] = {{1, 0, 5}, {4, 5, 0}};  // two fit
    for (const int unit : of_rank[rank]) toy_backward(*engine, engine->acquire(unit), unit, 0, 0, 1);
    engine->step(toy_groups(0));
  });
  for (const std::string& error : errors) {
    const bool told = error.find("no room for the gradient") != std::string::npos ||
                      error.find("destroyed by an exception") != std::string::npos;
    EXPECT_TRUE(told) << error;
  }
  EXPECT_NE((errors[0] + errors[1]).find("prefetch_units"), std::string::npos);
}

}  // namespace
}  // namespace overspill::testing
