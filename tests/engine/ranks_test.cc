// Several ranks: every stage gives the bits of the scalar reference, whatever the placement, device and
// transport; what it costs in bytes held and sent is what the formulas say.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <mutex>

#include "tests/engine/rank_world.h"

namespace overspill::testing {
namespace {

using engine::Engine;
using engine::Placement;

constexpr int kSteps = 8;

struct Outcome {
  std::vector<std::vector<float>> contents;              // by rank
  std::vector<std::vector<engine::StepResult>> results;  // by rank
};

Outcome train(int world, const RankOptions& options, int steps = kSteps) {
  Outcome out;
  out.contents.resize(static_cast<size_t>(world));
  out.results.resize(static_cast<size_t>(world));
  const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank(options, std::move(ranks));
    toy_load(*engine);
    for (int step = 0; step < steps; ++step)
      out.results[rank].push_back(toy_step(*engine, step, options.micro_batches, rank).result);
    out.contents[rank] = toy_contents(*engine);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  return out;
}

void expect_reference(int world, const RankOptions& options) {
  const Outcome got = train(world, options);
  const auto& results = got.results[0];
  ASSERT_EQ(results.size(), static_cast<size_t>(kSteps));
  EXPECT_LT(results.back().clip, 1.0);
  const std::vector<float> expected =
      toy_reference(kSteps, options.micro_batches, results, world, options.kind);
  for (int rank = 0; rank < world; ++rank) {
    ASSERT_EQ(digest(got.contents[rank], got.results[rank]), digest(expected, results)) << "rank " << rank;
  }
}

class Stages : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Stages, EqualTheScalarReferenceInEveryPlacementAndOnEveryDevice) {
  const auto [stage, world] = GetParam();
  for (const Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
    for (const char* device : {"host", "simulated"}) {
      SCOPED_TRACE(fmt::format("placement {} device {}", static_cast<int>(placement), device));
      expect_reference(world, {.stage = stage, .placement = placement, .device = device});
    }
  }
}

TEST_P(Stages, EqualTheScalarReferenceWithSeveralMicroBatches) {
  const auto [stage, world] = GetParam();
  for (const Placement placement : {Placement::host, Placement::nvme})
    expect_reference(world, {.stage = stage, .placement = placement, .micro_batches = 3});
}

TEST_P(Stages, HaveTheSameNormToTheBit) {
  const auto [stage, world] = GetParam();
  const Outcome got = train(world, {.stage = stage});
  const Outcome three = train(world, {.stage = 3, .placement = Placement::half, .prefetch_units = 0});
  for (int step = 0; step < kSteps; ++step) EXPECT_EQ(got.results[0][step].norm, three.results[0][step].norm);
}

INSTANTIATE_TEST_SUITE_P(Worlds, Stages, ::testing::Combine(::testing::Range(0, 4), ::testing::Range(1, 5)),
                         [](const auto& info) {
                           return fmt::format("stage{}_world{}", std::get<0>(info.param),
                                              std::get<1>(info.param));
                         });

}  // namespace
}  // namespace overspill::testing
