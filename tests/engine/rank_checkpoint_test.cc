// Checkpoints of several ranks: made at one world, opened at others, at another stage and placement, to the
// bit; whole or absent whichever rank fails.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "engine/checkpoint/manifest.h"
#include "tests/engine/around.h"
#include "tests/engine/rank_world.h"
#include "tests/test_folders.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::Engine;
using engine::Placement;

constexpr int kBefore = 3;
constexpr int kAfter = 3;

class RankCheckpoint : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("test-of-overspill-rank-checkpoint-{}", ::getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// Trains at `world` and saves; what the clip factors were.
  std::vector<engine::StepResult> save_at(int world, const RankOptions& options) {
    std::vector<engine::StepResult> results;
    const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const auto engine = toy_rank(options, std::move(ranks));
      toy_load(*engine);
      for (int step = 0; step < kBefore; ++step) {
        const auto result = toy_step(*engine, step, 1, rank).result;
        if (rank == 0) results.push_back(result);
      }
      engine->save(folder_ / "saved", R"({"by": "ranks"})");
      toy_step(*engine, kBefore, 1, rank);  // goes on, and does not touch what was saved
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    return results;
  }

  fs::path folder_;
};

void advance(ToyReference& reference, int step, double clip, int world) {
  reference.advance(
      step, 1, clip, [step](int u, int s, int rank) { return toy_skips(u, s, step, rank); }, world);
}

TEST_P(RankCheckpoint, OpensAtAnyOther) {
  const auto [stage, format] = GetParam();
  ToyKind kind;
  RankOptions options{.stage = stage, .placement = Placement::half};
  if (format == 1) kind.format = optim::Format::eight_bit;
  if (format == 2) options = {.stage = stage, .placement = Placement::device, .device = "simulated"};
  options.reaches = format == 2;
  options.kind = kind;
  const auto before = save_at(4, options);
  ToyReference saved(toy_units(kind));
  for (int step = 0; step < kBefore; ++step) advance(saved, step, before[step].clip, 4);

  EXPECT_EQ(engine::verify_checkpoint(folder_ / "saved", nullptr, nullptr).step, kBefore);
  EXPECT_GT(engine::merge_checkpoint(folder_ / "saved", folder_ / "merged", {}, nullptr, nullptr).tensors, 0);

  for (const int world : {1, 2, 3, 8}) {
    const int other_stage = (stage + world) % 4;
    RankOptions opened{.stage = other_stage, .placement = world % 2 == 0 ? Placement::nvme : Placement::host};
    if (world == 3) {
      opened.placement = Placement::device;
      opened.device = "simulated";
      opened.reaches = true;
    }
    opened.job = "opened";
    opened.kind = kind;
    SCOPED_TRACE(fmt::format("world {} stage {}", world, other_stage));
    std::vector<std::vector<float>> contents(static_cast<size_t>(world)), later(static_cast<size_t>(world));
    std::vector<engine::StepResult> results;
    const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const auto engine = toy_rank(opened, std::move(ranks));
      EXPECT_EQ(engine->load(folder_ / "saved"), R"({"by": "ranks"})");
      EXPECT_EQ(engine->stats().step, kBefore);
      contents[rank] = toy_contents(*engine);
      for (int step = kBefore; step < kBefore + kAfter; ++step) {
        const auto result = toy_step(*engine, step, 1, rank).result;
        if (rank == 0) results.push_back(result);
      }
      later[rank] = toy_contents(*engine);
    });
    for (const std::string& error : errors) ASSERT_EQ(error, "");
    ToyReference reference = saved;
    for (int rank = 0; rank < world; ++rank)
      EXPECT_EQ(digest(contents[rank], {}), digest(reference.contents(), {})) << "rank " << rank;
    for (int step = 0; step < kAfter; ++step) advance(reference, kBefore + step, results[step].clip, world);
    for (int rank = 0; rank < world; ++rank)
      EXPECT_EQ(digest(later[rank], {}), digest(reference.contents(), {})) << "rank " << rank;
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<int, int>>& info) {
  const char* const names[] = {"exact", "8bit", "on_the_device"};
  return fmt::format("stage{}_{}", std::get<0>(info.param), names[std::get<1>(info.param)]);
}

INSTANTIATE_TEST_SUITE_P(Stages, RankCheckpoint,
                         ::testing::Combine(::testing::Range(0, 4), ::testing::Range(0, 3)), name_of);

using RankCheckpoints = RankCheckpoint;

TEST_F(RankCheckpoints, ThatOneRankCannotWriteAreRefusedByAll) {
  const auto errors = on_ranks(3, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({.stage = 3, .placement = Placement::half}, std::move(ranks));
    toy_load(*engine);
    toy_step(*engine, 0, 1, rank);
    const std::vector<float> before = toy_contents(*engine);
    // Rank 2 looks for the folder in a place that is not there.
    const fs::path folder = rank == 2 ? folder_ / "elsewhere" / "saved" : folder_ / "saved";
    try {
      engine->save(folder, "{}");
      ADD_FAILURE() << "rank " << rank << " took it for saved";
    } catch (const engine::CheckpointError& error) {
      EXPECT_EQ(std::string(error.what()).find("rank 2: ") == 0, rank != 2) << error.what();
    }
    EXPECT_EQ(toy_contents(*engine), before);
    toy_step(*engine, 1, 1, rank);
    engine->save(folder_ / "second", "{}");  // nothing was left behind that is in the way
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_FALSE(fs::exists(folder_ / "saved"));
  EXPECT_FALSE(fs::exists(folder_ / "saved.partial"));
  EXPECT_EQ(engine::verify_checkpoint(folder_ / "second", nullptr, nullptr).step, 2);
}

/// Announces more bytes than there is memory for.
class Boasting final : public Around {
 public:
  using Around::Around;
  void all_gather(std::span<std::byte> data) override {
    const size_t head = 2 * sizeof(int64_t);  // of a rank's part of a save: failed, bytes
    constexpr int64_t kBytes = int64_t{1} << 62;
    if (data.size() == head * world())
      std::memcpy(data.data() + rank() * head + sizeof(int64_t), &kBytes, sizeof kBytes);
    Around::all_gather(data);
  }
};

TEST_F(RankCheckpoints, OfARankThatAnnouncesMoreThanThereCanBeAreRefused) {
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    if (rank == 1) ranks = std::make_unique<Boasting>(std::move(ranks));
    const auto engine = toy_rank({}, std::move(ranks));
    toy_load(*engine);
    engine->save(folder_ / "saved", "{}");
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 1 announces 4611686018427387904 bytes"), std::string::npos) << error;
  }
}

TEST_F(RankCheckpoints, ThatARankFindsDamagedAreRefusedByAllBeforeAnythingChanges) {
  save_at(2, {.stage = 3});
  const fs::path data = folder_ / "saved" / "rank1-resident.bin";
  ASSERT_TRUE(fs::exists(data));
  flip_a_bit(data, 100);
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({.stage = 2, .job = "opened"}, std::move(ranks));
    toy_load(*engine);
    toy_step(*engine, 0, 1, rank);  // before it nothing could be lost (load_once_test.cc)
    const std::vector<float> before = toy_contents(*engine);
    try {
      engine->load(folder_ / "saved");
      ADD_FAILURE() << "rank " << rank << " took it";
    } catch (const engine::CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find("rank1-resident.bin"), std::string::npos) << error.what();
    }
    EXPECT_EQ(toy_contents(*engine), before);
    toy_step(*engine, 1, 1, rank);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST_F(RankCheckpoints, WithoutOneRanksDataAreNoCheckpoints) {
  save_at(3, {.stage = 3});
  fs::remove(folder_ / "saved" / "rank2-resident.bin");
  EXPECT_THROW(engine::verify_checkpoint(folder_ / "saved", nullptr, nullptr), engine::CheckpointError);
}

}  // namespace
}  // namespace overspill::testing
