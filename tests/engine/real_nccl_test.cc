// NCCL itself, a GPU each rank. Without the library or the GPUs these are skipped and say what is missing.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/collectives/nccl.h"
#include "engine/collectives/nccl_library.h"
#include "kernels/cuda/cuda_device.h"
#include "tests/engine/collectives_conformance.h"
#include "tests/engine/rank_world.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"

namespace overspill::engine {
namespace {

using testing::on_ranks;

constexpr auto kPatience = std::chrono::seconds(60);

/// Empty: there are the library and so many GPUs.
std::string why_not(int gpus) {
  if (std::string why = kernels::why_no_cuda(gpus - 1); !why.empty()) return why;
  try {
    (void)nccl::load({});
  } catch (const CommunicatorError& error) {
    return error.what();
  }
  return {};
}

/// Over NCCL whatever its size.
std::unique_ptr<Communicator> join(std::unique_ptr<Communicator> control,
                                   std::shared_ptr<kernels::Device> device) {
  NcclOptions options;
  options.staging_bytes = 1 << 20;
  options.small_bytes = 0;
  options.timeout = kPatience;
  return make_nccl_communicator(std::move(control), std::move(device), options);
}
std::unique_ptr<Communicator> join(std::unique_ptr<Communicator> control, int gpu) {
  return join(std::move(control), kernels::make_cuda_device(gpu));
}

class RealNccl : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (const std::string why = why_not(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }
  /// Each rank on the GPU of its number.
  std::vector<std::string> run(const std::function<void(Communicator&)>& body) {
    return on_ranks(
        GetParam(),
        [&](int rank, std::unique_ptr<Communicator> control) { body(*join(std::move(control), rank)); },
        kPatience);
  }
  const std::vector<std::string> nothing_ = std::vector<std::string>(static_cast<size_t>(GetParam()));
};

INSTANTIATE_TEST_SUITE_P(Gpus, RealNccl, ::testing::Values(1, 2),
                         [](const auto& info) { return fmt::format("of_{}", info.param); });

TEST_P(RealNccl, MovesEverySlice) {
  EXPECT_EQ(run([](Communicator& ranks) { conformance::move_every_slice(ranks); }), nothing_);
}

TEST_P(RealNccl, ExchangesWhatEachPairWants) {
  EXPECT_EQ(run([](Communicator& ranks) { conformance::exchange_what_each_pair_wants(ranks); }), nothing_);
}

TEST_P(RealNccl, ExchangesFromEitherMemory) {
  const auto errors = on_ranks(
      GetParam(),
      [&](int rank, std::unique_ptr<Communicator> control) {
        const std::shared_ptr<kernels::Device> device = kernels::make_cuda_device(rank);
        conformance::exchange_from_either_memory(*join(std::move(control), device), *device);
      },
      kPatience);
  EXPECT_EQ(errors, nothing_);
}

TEST_P(RealNccl, SumsInRankOrderToTheBit) {
  EXPECT_EQ(run([](Communicator& ranks) { conformance::sum_in_rank_order_to_the_bit(ranks); }), nothing_);
}

TEST_P(RealNccl, ReducesAndScatters) {
  EXPECT_EQ(run([](Communicator& ranks) { conformance::reduce_and_scatter(ranks); }), nothing_);
}

/// The bits of ranks that share memory, whatever carries them, and wherever shards meet and live.
TEST_P(RealNccl, TrainsToTheBitsOfTheReference) {
  constexpr int kSteps = 10;
  struct Case {
    int stage;
    bool on_device;
    Placement placement;
  };
  for (const Case& c : {Case{1, true, Placement::host},
                        {2, true, Placement::host},
                        {3, true, Placement::host},
                        {3, false, Placement::host},
                        {1, true, Placement::device},
                        {2, true, Placement::device},
                        {3, true, Placement::device}}) {
    std::vector<StepResult> results;
    std::vector<float> contents;
    const auto errors = on_ranks(
        GetParam(),
        [&](int rank, std::unique_ptr<Communicator> control) {
          testing::RankOptions options;
          options.stage = c.stage;
          options.placement = c.placement;
          options.given_device = kernels::make_cuda_device(rank);
          auto ranks =
              c.on_device ? join(std::move(control), options.given_device) : join(std::move(control), rank);
          const auto engine = testing::toy_rank(options, std::move(ranks));
          testing::toy_load(*engine);
          std::vector<StepResult> own;
          for (int step = 0; step < kSteps; ++step)
            own.push_back(testing::toy_step(*engine, step, 1, rank).result);
          const auto all = testing::toy_contents(*engine);
          if (rank != 0) return;
          results = own;
          contents = all;
        },
        kPatience);
    EXPECT_EQ(errors, nothing_);
    testing::expect_same_bits(
        contents, testing::toy_reference(kSteps, 1, results, GetParam()),
        fmt::format("stage {} over {} GPUs, shards meet on {}, placement {}", c.stage, GetParam(),
                    c.on_device ? "them" : "the host", testing::placement_name(c.placement)));
  }
}

/// NCCL takes no two ranks on one GPU: every rank is told, and none waits for ever.
TEST(RealNcclOnOneGpu, RefusesTwoRanks) {
  if (const std::string why = why_not(1); !why.empty()) GTEST_SKIP() << why;
  const auto errors = on_ranks(
      2, [&](int, std::unique_ptr<Communicator> control) { (void)join(std::move(control), 0); }, kPatience);
  for (const std::string& error : errors) EXPECT_NE(error, "");
}

}  // namespace
}  // namespace overspill::engine
