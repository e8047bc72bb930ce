// Several ranks: every stage gives the bits of the scalar reference, whatever the placement, device and
// transport; what it costs in bytes held and sent is what the formulas say.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <functional>
#include <future>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "engine/plan/plan.h"
#include "tests/engine/around.h"
#include "tests/engine/batch_model.h"
#include "tests/engine/rank_world.h"
#include "tests/watched.h"

namespace overspill::testing {
namespace {

using engine::Engine;
using engine::Placement;

constexpr int kSteps = kWatched ? 4 : 8;

struct Outcome {
  std::vector<std::vector<float>> contents;              // by rank
  std::vector<std::vector<engine::StepResult>> results;  // by rank
  std::vector<int64_t> units_on_device;                  // by rank
};

/// Of which options differ from rank to rank, what has to be the same aside.
Outcome train(const std::vector<RankOptions>& by_rank, int steps = kSteps) {
  const auto world = static_cast<int>(by_rank.size());
  Outcome out;
  out.contents.resize(static_cast<size_t>(world));
  out.results.resize(static_cast<size_t>(world));
  out.units_on_device.resize(static_cast<size_t>(world));
  const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const RankOptions& options = by_rank[rank];
    const auto engine = toy_rank(options, std::move(ranks));
    out.units_on_device[rank] = engine->plan().units_on_device();
    toy_load(*engine);
    const auto take = options.together ? toy_step_together : toy_step;
    for (int step = 0; step < steps; ++step)
      out.results[rank].push_back(take(*engine, step, options.micro_batches, rank).result);
    out.contents[rank] = toy_contents(*engine);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  return out;
}

Outcome train(int world, const RankOptions& options, int steps = kSteps) {
  return train(std::vector(static_cast<size_t>(world), options), steps);
}

void expect_reference(const Outcome& got, const RankOptions& options) {
  const auto world = static_cast<int>(got.results.size());
  const auto& results = got.results[0];
  ASSERT_EQ(results.size(), static_cast<size_t>(kSteps));
  EXPECT_LT(results.back().clip, 1.0);
  const std::vector<float> expected =
      toy_reference(kSteps, options.micro_batches, results, world, options.kind);
  for (int rank = 0; rank < world; ++rank) {
    ASSERT_EQ(digest(got.contents[rank], got.results[rank]), digest(expected, results)) << "rank " << rank;
  }
}

void expect_reference(int world, const RankOptions& options) {
  expect_reference(train(world, options), options);
}

class Stages : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Stages, EqualTheScalarReferenceInEveryPlacementAndOnEveryDevice) {
  const auto [stage, world] = GetParam();
  for (const Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
    for (const std::string& device : toy_devices()) {
      for (const bool reaches : {false, true}) {
        if (reaches && device != "simulated") continue;
        SCOPED_TRACE(
            fmt::format("placement {} device {} reaches {}", static_cast<int>(placement), device, reaches));
        expect_reference(world,
                         {.stage = stage, .placement = placement, .device = device, .reaches = reaches});
      }
    }
  }
}

/// Each rank's shard lives on its device, is updated there, and its gradients are summed there; at stage 0,
/// where sums go to all ranks, none does.
TEST_P(Stages, EqualTheScalarReferenceWithUnitsOnTheDevice) {
  const auto [stage, world] = GetParam();
  RankOptions options{.stage = stage, .placement = Placement::device, .device = "simulated", .reaches = true};
  const auto expect_there = [&, stage = stage, world = world] {
    const Outcome got = train(world, options);
    for (const int64_t units : got.units_on_device) EXPECT_EQ(units, stage == 0 && world > 1 ? 0 : 5);
    expect_reference(got, options);
  };
  for (const bool poison : {true, false}) {
    options.poison = poison;
    expect_there();
  }
  options.prefetch_units = 0;
  expect_there();
  options.prefetch_units = 4;
  options.micro_batches = 3;
  for (const bool together : {false, true}) {
    SCOPED_TRACE(fmt::format("3 micro-batches, together {}", together));
    options.together = together;
    expect_there();
  }
}

/// One rank has room for more units ahead than the other, so a group holds units that one of them has
/// already.
TEST(RanksBucket, GroupsChangeNoBit) {
  for (const int64_t bucket : {int64_t{0}, int64_t{1} << 30}) {
    std::vector<RankOptions> by_rank(2, {.stage = 3, .prefetch_units = 4, .bucket_bytes = bucket});
    by_rank[1].prefetch_units = 2;
    for (const Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
      for (RankOptions& options : by_rank) options.placement = placement;
      expect_reference(train(by_rank), by_rank[0]);
    }
  }
}

/// Where each rank has a part of the states.
class Shards : public Stages {};

/// Every optimizer and format, of which random bits go by the element's place in the unit over all ranks.
TEST_P(Shards, OnTheDeviceEqualTheScalarReferenceInEveryKind) {
  const auto [stage, world] = GetParam();
  for (int o = 0; o < optim::kOptimizerCount; ++o) {
    for (const optim::Format format : {optim::Format::fp32, optim::Format::exact, optim::Format::fp16,
                                       optim::Format::compact, optim::Format::eight_bit}) {
      if ((o + stage + world) % 3 != 0) continue;  // each of them in some worlds
      RankOptions options{
          .stage = stage, .placement = Placement::device, .device = "simulated", .reaches = true};
      options.kind = {optim::Optimizer{static_cast<uint8_t>(o)}, format};
      SCOPED_TRACE(fmt::format("{} {}", optim::name(options.kind.optimizer), optim::name(format)));
      const Outcome got = train(world, options);
      for (const int64_t units : got.units_on_device) EXPECT_EQ(units, 5);
      expect_reference(got, options);
    }
  }
}

/// What lives on one rank's device may be on another's host or NVMe, or on a device that no transport
/// reaches.
TEST_P(Stages, EqualTheScalarReferenceWithUnitsOnTheDeviceOfSomeRanks) {
  const auto [stage, world] = GetParam();
  for (const int micro_batches : {1, 3}) {
    std::vector<RankOptions> by_rank;
    for (int rank = 0; rank < world; ++rank) {
      RankOptions options{.stage = stage, .micro_batches = micro_batches};
      if (rank % 4 != 2) options.device = "simulated";
      options.reaches = rank % 4 < 2;
      options.placement = rank % 4 == 0   ? Placement::device
                          : rank % 4 == 1 ? Placement::half
                                          : Placement::nvme;
      by_rank.push_back(options);
    }
    expect_reference(train(by_rank), by_rank[0]);
  }
}

TEST_P(Stages, EqualTheScalarReferenceWithSeveralMicroBatches) {
  const auto [stage, world] = GetParam();
  for (const Placement placement : {Placement::host, Placement::nvme})
    expect_reference(world, {.stage = stage, .placement = placement, .micro_batches = 3});
}

TEST_P(Stages, EqualTheScalarReferenceBySumsOfTheTransport) {
  const auto [stage, world] = GetParam();
  // In process they are added in rank order too, and rounded once before the mean.
  for (const int micro_batches : {1, 3}) {
    if (world == 3 && micro_batches == 1) continue;  // a third of a rounded sum has other bits
    for (const Placement placement : {Placement::host, Placement::nvme})
      expect_reference(
          world,
          {.stage = stage, .placement = placement, .micro_batches = micro_batches, .library_sums = true});
  }
}

TEST_P(Stages, EqualTheScalarReferenceWhenMicroBatchesPassUnitsTogether) {
  const auto [stage, world] = GetParam();
  for (const Placement placement : {Placement::host, Placement::nvme})
    expect_reference(world, {.stage = stage, .placement = placement, .micro_batches = 3, .together = true});
}

TEST(MicroBatches, ThatPassUnitsTogetherLeaveNoRankAWholeGradient) {
  const BatchModel model{.layers = 24, .width = 64, .batch = 12, .format = optim::Format::exact};
  constexpr int kWorld = 4;
  for (const bool together : {false, true}) {
    const auto errors = on_ranks(kWorld, [&](int, std::unique_ptr<engine::Communicator> ranks) {
      const auto engine = model_rank(
          model.units(), {.stage = 3, .micro_batches = 3, .together = together, .prefetch_units = 0},
          std::move(ranks));
      int64_t elements = 0, largest = 0;
      for (const engine::Unit& unit : engine->layout().units) {
        elements += unit.elements;
        largest = std::max(largest, unit.elements);
      }
      const engine::Plan& plan = engine->plan();
      EXPECT_EQ(plan.gradients_host_bytes, together ? elements * 4 / kWorld : elements * 4) << "fp32 sums";
      EXPECT_EQ(plan.gradient_pool_bytes, together ? 2 * largest * 4 : 0) << "one arrives, one is summed";
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

/// The pool is for two units: the others' sums come too early, and again.
TEST(MicroBatches, OneAfterAnotherAreRightAlsoWherePassesTogetherWereSaid) {
  for (const int stage : {2, 3}) {
    const RankOptions options{.stage = stage, .micro_batches = 3, .together = true, .prefetch_units = 0};
    std::vector<std::vector<float>> contents(2);
    const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const auto engine = toy_rank(options, std::move(ranks));
      toy_load(*engine);
      for (int step = 0; step < kSteps; ++step) toy_step(*engine, step, options.micro_batches, rank);
      contents[rank] = toy_contents(*engine);
    });
    for (const std::string& error : errors) ASSERT_EQ(error, "");
    const Outcome whole = train(2, {.stage = 1, .micro_batches = 3});
    ASSERT_EQ(digest(contents[0], {}), digest(contents[1], {}));
    for (size_t i = 0; i < contents[0].size(); ++i) ASSERT_NEAR(contents[0][i], whole.contents[0][i], 1e-4);
  }
}

TEST_P(Stages, HaveTheSameNormToTheBit) {
  const auto [stage, world] = GetParam();
  const Outcome got = train(world, {.stage = stage});
  const Outcome three = train(world, {.stage = 3, .placement = Placement::half, .prefetch_units = 0});
  for (int step = 0; step < kSteps; ++step) EXPECT_EQ(got.results[0][step].norm, three.results[0][step].norm);
}

/// At every stage alike: the ranks' gradients were summed by then.
TEST_P(Stages, RefuseAGradientAfterClipGradNorm) {
  const auto [stage, world] = GetParam();
  if (world == 1) return;  // there it is added to the scaled ones (clipping_test.cc)
  const auto errors = on_ranks(world, [stage = stage](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({.stage = stage, .max_grad_norm = 0}, std::move(ranks));
    toy_load(*engine);
    const std::vector<float> any(static_cast<size_t>(engine->layout().units[0].segments[0].elements), 0.5F);
    toy_add_gradient_always(*engine, any, 0, 0, 0, 0, rank);
    engine->clip_grad_norm(1e-3);
    EXPECT_THROW(toy_add_gradient_always(*engine, any, 0, 0, 0, 1, rank), std::invalid_argument);
    engine->close();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// At every stage alike.
TEST_P(Stages, HaveAnInfiniteNormWhereAGradientIsNotANumber) {
  const auto [stage, world] = GetParam();
  if (world == 1) return;  // there it is NaN (clipping_test.cc)
  const auto errors = on_ranks(world, [stage = stage](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({.stage = stage, .max_grad_norm = 0}, std::move(ranks));
    toy_load(*engine);
    const std::vector<float> bad(static_cast<size_t>(engine->layout().units[2].segments[0].elements),
                                 std::numeric_limits<float>::quiet_NaN());
    if (rank == 0) engine->add_gradient(2, 0, std::as_bytes(std::span(bad)), "F32");
    EXPECT_EQ(engine->grad_norm(), std::numeric_limits<double>::infinity());
    engine->close();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// Losses of a model on batches that `world` ranks divide.
std::vector<double> batch_losses(int world, int stage, optim::Format format) {
  constexpr int kBatchSteps = 20;
  const BatchModel model{.format = format};
  std::vector<std::vector<double>> by_rank(static_cast<size_t>(world));
  const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = model_rank(model.units(), {.stage = stage, .max_grad_norm = 0}, std::move(ranks));
    model.load(*engine);
    for (int step = 0; step < kBatchSteps; ++step)
      by_rank[rank].push_back(model.train(*engine, step, rank, world));
    engine->synchronize();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  std::vector<double> losses(kBatchSteps);
  for (const auto& own : by_rank) {
    for (size_t i = 0; i < own.size(); ++i) losses[i] += own[i];
  }
  return losses;
}

TEST_P(Stages, LearnWhatOneProcessLearnsOnTheWholeBatch) {
  const auto [stage, world] = GetParam();
  for (const auto& [format, tolerance] :
       {std::pair{optim::Format::fp32, 1e-5}, {optim::Format::exact, 1e-3}}) {
    const auto got = batch_losses(world, stage, format);
    const auto one = batch_losses(1, 3, format);
    EXPECT_LT(one.back(), 0.8 * one.front()) << "it has to learn something for this to mean anything";
    for (size_t i = 0; i < one.size(); ++i)
      EXPECT_NEAR(got[i], one[i], tolerance * one[i])
          << "step " << i << " format " << static_cast<int>(format);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Stages, ::testing::Combine(::testing::Range(0, 4), ::testing::Range(1, 5)),
                         [](const auto& info) {
                           return fmt::format("stage{}_world{}", std::get<0>(info.param),
                                              std::get<1>(info.param));
                         });

INSTANTIATE_TEST_SUITE_P(Worlds, Shards, ::testing::Combine(::testing::Range(1, 4), ::testing::Range(2, 5)),
                         [](const auto& info) {
                           return fmt::format("stage{}_world{}", std::get<0>(info.param),
                                              std::get<1>(info.param));
                         });

/// A transport as a torch.distributed group is one.
class WithoutReduction final : public Around {
 public:
  using Around::Around;
  bool reduces() const override { return false; }
};

/// Rank 1 asks for a unit when rank 0 has had it and is about to change it: both get what was there before.
TEST(Changes, WaitForARankThatHasYetToReadWhatWasThereBefore) {
  for (const int stage : {1, 3}) {
    SCOPED_TRACE(fmt::format("stage {}", stage));
    std::promise<void> changing;
    std::vector<std::vector<std::byte>> before(2);
    std::vector<std::vector<std::byte>> after(2);
    const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const auto engine = toy_rank({.stage = stage}, std::move(ranks));
      const auto read = [&](int32_t unit, std::vector<std::byte>& out) {
        const engine::Lease lease = engine->acquire(unit);
        out.resize(static_cast<size_t>(lease.bytes()));
        lease.copy_to_host(0, out);
      };
      toy_load(*engine);
      if (rank == 1) {
        changing.get_future().wait();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // rank 0 goes as far as it can
      }
      engine->begin_pass({false, false});
      read(0, before[rank]);
      if (rank == 0) changing.set_value();
      const std::vector<float> fresh(static_cast<size_t>(engine->layout().units[0].segments[0].elements),
                                     0.5F);
      engine->load_weight(0, 0, std::as_bytes(std::span(fresh)), "F32");
      std::vector<std::byte> other;
      read(1, other);
      read(0, after[rank]);
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    EXPECT_EQ(before[0], before[1]);
    EXPECT_EQ(after[0], after[1]);
    EXPECT_NE(before[0], after[0]);
  }
}

TEST(SumsOfTheTransport, AreRefusedWhereItHasNone) {
  const auto errors = on_ranks(2, [&](int, std::unique_ptr<engine::Communicator> ranks) {
    toy_rank({.library_sums = true}, std::make_unique<WithoutReduction>(std::move(ranks)));
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("this transport has no reduction of its own"), std::string::npos) << error;
}

TEST(Volume, IsWhatTheFormulasSay) {
  // Equal units, of which the arena takes three: what is kept at the turn of a step is left out.
  const BatchModel model{.layers = 24, .width = 64, .batch = 12, .format = optim::Format::exact};
  constexpr int kVolumeSteps = 6;
  for (const int world : {2, 4}) {
    std::vector<double> volume;  // by stage, of plain data parallelism's
    std::vector<double> bytes;   // held a padded parameter, without buffers of fixed size
    for (const auto& [stage, library_sums] :
         {std::pair{0, false}, {1, false}, {2, false}, {3, false}, {2, true}}) {
      std::vector<int64_t> sent(static_cast<size_t>(world));
      double held = 0;
      const RankOptions options{.stage = stage, .prefetch_units = 0, .library_sums = library_sums};
      // In stage 3 a rank far behind has no room for what the others gather, and asks for it again later.
      std::barrier pace(world);
      const std::function<void()> keep_pace = [&pace, gathers = stage == 3] {
        if (gathers) pace.arrive_and_wait();
      };
      const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
        const auto leave = std::shared_ptr<void>(nullptr, [&](void*) { pace.arrive_and_drop(); });
        const auto traffic = std::make_shared<engine::Traffic>();
        const auto engine = model_rank(model.units(), options, std::move(ranks), traffic);
        model.load(*engine);
        // From forward's end to forward's end: a step returns while its updates still send weights, and the
        // next forward needs all of them.
        int64_t before = 0, after = 0;
        for (int step = 0; step <= 2 + kVolumeSteps; ++step) {
          const auto count = [&] {
            after = traffic->exchanged.sent_bytes.load() + traffic->scattered.sent_bytes.load();
            if (step == 2) before = after;
          };
          model.train(*engine, step, rank, world, {.before_layer = keep_pace, .after_forward = count});
        }
        sent[rank] = (after - before) / kVolumeSteps;
        EXPECT_EQ(traffic->scattered.sent_bytes > 0, options.library_sums);
        int64_t elements = 0;
        for (const engine::Unit& unit : engine->layout().units) elements += unit.elements;
        const engine::Plan& plan = engine->plan();
        if (rank == 0)
          held = static_cast<double>(plan.weights_host_bytes + plan.states_host_bytes +
                                     plan.gradients_host_bytes) /
                 static_cast<double>(elements);
      });
      for (const std::string& error : errors) ASSERT_EQ(error, "");
      int64_t elements = 0;
      const auto layout = engine::make_layout(model.units(), 2048, 0, world, stage);
      for (const engine::Unit& unit : layout.units) elements += unit.elements;
      const double plain = 2.0 * 2.0 * static_cast<double>(elements) * (world - 1) / world;
      volume.push_back(static_cast<double>(sent[0]) / plain);
      bytes.push_back(held);
    }
    EXPECT_NEAR(volume[0], 1.0, 0.02);
    EXPECT_NEAR(volume[1], 1.0, 0.02);
    EXPECT_NEAR(volume[2], 1.0, 0.02);
    EXPECT_LE(volume[3], 1.5);
    EXPECT_GT(volume[3], 1.35) << "but for what is kept at the turn";
    EXPECT_NEAR(volume[4], 1.0, 0.02) << "the transport's own sums";
    EXPECT_DOUBLE_EQ(bytes[0], 14.0);
    EXPECT_DOUBLE_EQ(bytes[1], 4.0 + 10.0 / world);
    EXPECT_DOUBLE_EQ(bytes[2], 2.0 + 12.0 / world);
    EXPECT_DOUBLE_EQ(bytes[3], 14.0 / world);
  }
}

}  // namespace
}  // namespace overspill::testing
