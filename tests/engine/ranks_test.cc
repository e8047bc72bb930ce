// Several ranks: every stage gives the bits of the scalar reference, whatever the placement, device and
// transport; what it costs in bytes held and sent is what the formulas say.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <utility>

#include "kernels/simulated_device.h"
#include "tests/engine/batch_model.h"
#include "tests/engine/rank_world.h"
#include "tests/kernels/gate.h"
#include "tests/watched.h"

namespace overspill::testing {
namespace {

using engine::Engine;
using engine::Placement;

constexpr int kSteps = kWatched ? 4 : 8;

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
    const auto take = options.together ? toy_step_together : toy_step;
    for (int step = 0; step < steps; ++step)
      out.results[rank].push_back(take(*engine, step, options.micro_batches, rank).result);
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

/// A transport as a torch.distributed group is one.
class WithoutReduction final : public engine::Communicator {
 public:
  explicit WithoutReduction(std::unique_ptr<engine::Communicator> ranks) : ranks_(std::move(ranks)) {}
  int rank() const override { return ranks_->rank(); }
  int world() const override { return ranks_->world(); }
  void all_gather(std::span<std::byte> data) override { ranks_->all_gather(data); }
  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    ranks_->all_to_all(send, receive);
  }
  void exchange(std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive) override {
    ranks_->exchange(send, receive);
  }
  void all_reduce_sum(std::span<double> values) override { ranks_->all_reduce_sum(values); }
  void barrier() override { ranks_->barrier(); }
  void abort(const char* reason) noexcept override { ranks_->abort(reason); }

 private:
  std::unique_ptr<engine::Communicator> ranks_;
};

/// Shards that meet on the device pass through no host memory, and from NVMe through a shard's.
TEST(GatheringOnADevice, TakesNoHostMemory) {
  const auto host_bytes = [](Placement placement, bool reaches) {
    int64_t bytes = 0;
    const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const RankOptions options{
          .placement = placement, .device = "simulated", .reaches = reaches, .prefetch_units = 0};
      const auto engine = toy_rank(options, std::move(ranks));
      if (rank == 0) bytes = engine->plan().gather_host_bytes;
      engine->close();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    return bytes;
  };
  EXPECT_EQ(host_bytes(Placement::host, true), 0);
  EXPECT_GT(host_bytes(Placement::nvme, true), 0);
  EXPECT_LT(host_bytes(Placement::nvme, true), host_bytes(Placement::nvme, false) * 6 / 10);
}

/// Gradients wait for their sums on the device where its budget has room beside the weights that are leased
/// at once, elsewhere on the host; what was planned is what is taken.
TEST(GatheringOnADevice, KeepsToTheDevicesBudget) {
  const auto plan_with = [](int64_t budget) {
    engine::Plan plan;
    const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const std::shared_ptr<kernels::SimulatedDevice> device = kernels::make_simulated_device();
      const RankOptions options{.given_device = device, .device_budget_bytes = budget, .reaches = true};
      const auto engine = toy_rank(options, std::move(ranks));
      toy_load(*engine);
      toy_step(*engine, 0, 1, rank);
      EXPECT_EQ(device->used_bytes(), engine->plan().device_bytes());
      if (rank == 0) plan = engine->plan();
      engine->close();
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    return plan;
  };
  const engine::Plan roomy = plan_with(int64_t{1} << 30);
  EXPECT_GT(roomy.sums_device_bytes, 0);
  EXPECT_EQ(roomy.pool_host_bytes(), 0);
  const engine::Plan fits = plan_with(roomy.device_bytes());
  EXPECT_EQ(fits.sums_device_bytes, roomy.sums_device_bytes);
  const engine::Plan tight = plan_with(roomy.device_bytes() - roomy.sums_device_bytes / 2);
  EXPECT_LE(tight.device_bytes(), roomy.device_bytes() - roomy.sums_device_bytes / 2);
  const engine::Plan unlimited = plan_with(0);
  const engine::Plan tightest = plan_with(unlimited.gather_device_bytes);
  EXPECT_EQ(tightest.sums_device_bytes, 0);
  EXPECT_EQ(tightest.pool_host_bytes(), unlimited.gradient_pool_bytes);
  EXPECT_LT(unlimited.host_bytes(), tightest.host_bytes());
}

/// Whatever comes from the device or goes there does so from pinned memory.
TEST(GatheringOnADevice, CopiesPinnedMemory) {
  for (const Placement placement : {Placement::host, Placement::nvme}) {
    for (const bool reaches : {false, true}) {
      const auto errors = on_ranks(2, [&](int, std::unique_ptr<engine::Communicator> ranks) {
        const std::shared_ptr<kernels::SimulatedDevice> device = kernels::make_simulated_device();
        const RankOptions options{.placement = placement, .given_device = device, .reaches = reaches};
        const auto engine = toy_rank(options, std::move(ranks));
        const auto queue = device->make_stream();
        engine->begin_pass({true, true});
        for (int u = 0; u < static_cast<int>(engine->layout().units.size()); ++u) {
          (void)engine->acquire(u, engine::Queue{queue->native()});
          const engine::Unit& unit = engine->layout().units[u];
          for (size_t s = 0; unit.trainable() && s < unit.segments.size(); ++s) {
            const int64_t bytes = unit.segments[s].elements * unit.element_bytes;
            const auto gradient = std::make_shared<kernels::DeviceMemory>(device->allocate(bytes));
            engine->add_gradient(u, static_cast<int32_t>(s), {gradient->data(), bytes, unit.dtype, gradient},
                                 engine::Queue{queue->native()});
          }
        }
        EXPECT_TRUE(engine->step(toy_groups(0)).skipped) << "NaN, as new memory reads";
        engine->close();
        EXPECT_EQ(device->unpinned_copies(), 0) << static_cast<int>(placement) << " " << reaches;
      });
      for (const std::string& error : errors) EXPECT_EQ(error, "");
    }
  }
}

/// A rank whose room on the device is in use for long does not ask for the unit yet, so it serves the others.
TEST(GatheringOnADevice, WaitsForNobodysQueue) {
  const auto gate = std::make_shared<kernels::Gate>();
  std::atomic<bool> all_acquired = false;
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const RankOptions options{.device = "simulated", .reaches = true, .prefetch_units = 0, .poison = false};
    const auto engine = toy_rank(options, std::move(ranks));
    toy_load(*engine);
    engine->begin_pass({false, false});
    const auto units = static_cast<int>(engine->layout().units.size());
    const auto queue = engine->device()->make_stream();
    if (rank == 0) queue->wait(kernels::Event(gate));
    for (int n = 0; n < 20 * units; ++n) {
      if (rank == 0) {
        (void)engine->acquire(n % units, engine::Queue{queue->native()});
      } else {
        (void)engine->acquire(n % units);
      }
    }
    if (rank == 0) all_acquired = true;
    if (rank == 1) {
      EXPECT_FALSE(all_acquired) << "there was room for all";
      gate->open();
    }
    queue->record().wait();
    engine->close();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
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
      const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
        const auto traffic = std::make_shared<engine::Traffic>();
        const auto engine = model_rank(model.units(), options, std::move(ranks), traffic);
        model.load(*engine);
        model.train(*engine, 0, rank, world);
        model.train(*engine, 1, rank, world);
        const auto data = [&] {
          return traffic->exchanged.sent_bytes.load() + traffic->scattered.sent_bytes.load();
        };
        const int64_t before = data();
        for (int step = 2; step < 2 + kVolumeSteps; ++step) model.train(*engine, step, rank, world);
        sent[rank] = (data() - before) / kVolumeSteps;
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
