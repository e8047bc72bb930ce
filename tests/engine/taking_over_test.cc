// A run goes on from a checkpoint in that checkpoint's slabs: with the bits of one that never ended, without
// a copy, and every checkpoint that was there stays whole.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/resources.h"
#include "io/part_folder.h"
#include "tests/engine/rank_world.h"
#include "tests/engine/toy_model.h"
#include "tests/io/loop_disk.h"
#include "tests/test_folders.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::Config;
using engine::Engine;

class TakingOver : public ::testing::Test {
 protected:
  void TearDown() override {
    fs::remove_all(here_);
    fs::remove_all(there_);
  }

  Config config_for(std::vector<fs::path> checkpoints) const {
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = paths_;
    config.job = "over";
    config.threads = 1;
    config.chunk_elements = 4096;
    config.checkpoints_kept = 2;
    config.placement = engine::Placement::nvme;
    config.take_over = std::move(checkpoints);
    return config;
  }

  std::unique_ptr<Engine> run(
      std::vector<fs::path> checkpoints, const std::function<void(Config&)>& change = [](Config&) {}) const {
    Config config = config_for(std::move(checkpoints));
    change(config);
    auto engine = std::make_unique<Engine>(toy_units(), config,
                                           make_resources(toy_units(), config, {"host", "threads", 1}));
    toy_load(*engine);
    return engine;
  }

  static void train(Engine& engine, int from, int to) {
    for (int step = from; step < to; ++step) toy_step(engine, step, 1, 0);
    engine.synchronize();
  }

  /// A run of two steps with a checkpoint after each, which ends in the middle of the third.
  void first_run() {
    const auto engine = run({});
    train(*engine, 0, 1);
    engine->save(here_ / "one", "{}");
    train(*engine, 1, 2);
    engine->save(here_ / "two", "{}");
    at_two_ = toy_contents(*engine);
    train(*engine, 2, 3);
    reserved_ = engine->stats().store.reserved_bytes;
  }

  /// What a run has after so many steps that never ended.
  std::vector<float> undisturbed(int steps) const {
    const auto engine = run({}, [](Config& config) { config.job = "undisturbed"; });
    train(*engine, 0, steps);
    return toy_contents(*engine);
  }

  static void expect_whole(const fs::path& checkpoint) {
    EXPECT_NO_THROW(engine::verify_checkpoint(checkpoint, nullptr, nullptr)) << checkpoint;
  }

  fs::path here_ = empty_folder(fs::temp_directory_path(), "taking-over");
  fs::path there_ = empty_folder("/dev/shm", "taking-over");
  std::vector<fs::path> paths_{here_};
  std::vector<float> at_two_;
  int64_t reserved_ = 0;
};

TEST_F(TakingOver, LoadsWithoutACopyAndTrainsToTheSameBits) {
  first_run();
  const auto engine = run({here_ / "two", here_ / "one"});
  const int64_t written = engine->stats().store.bytes_written;
  EXPECT_LE(engine->stats().store.reserved_bytes, reserved_);
  engine->load(here_ / "two");
  EXPECT_EQ(engine->stats().store.bytes_written, written) << "what was there already was written again";
  EXPECT_EQ(toy_contents(*engine), at_two_);
  for (int step = 2; step < 8; ++step) {
    train(*engine, step, step + 1);
    const fs::path next = here_ / fmt::format("next{}", step);
    engine->save(next, "{}");
    engine::remove_save(next);
  }
  EXPECT_LE(engine->stats().store.reserved_bytes, reserved_);
  EXPECT_EQ(toy_contents(*engine), undisturbed(8));
  expect_whole(here_ / "one");
  expect_whole(here_ / "two");
}

TEST_F(TakingOver, TheOlderOneIsThereToGoBackTo) {
  first_run();
  const auto engine = run({here_ / "two", here_ / "one"});
  engine->load(here_ / "two");
  train(*engine, 2, 5);
  engine->load(here_ / "one");  // no copy either
  engine->load(here_ / "one");  // its extents are the engine's already
  train(*engine, 1, 2);
  EXPECT_EQ(toy_contents(*engine), at_two_);
  engine->load(here_ / "two");
  EXPECT_EQ(toy_contents(*engine), at_two_);
  expect_whole(here_ / "one");
}

TEST_F(TakingOver, ARunGoesBackToACheckpointOfItsOwnWithoutACopy) {
  const auto engine = run({});
  train(*engine, 0, 2);
  engine->save(here_ / "own", "{}");
  const std::vector<float> at_two = toy_contents(*engine);
  train(*engine, 2, 4);
  const int64_t written = engine->stats().store.bytes_written;
  engine->load(here_ / "own");
  EXPECT_EQ(engine->stats().store.bytes_written, written);
  EXPECT_EQ(toy_contents(*engine), at_two);
  train(*engine, 2, 4);
  EXPECT_EQ(toy_contents(*engine), undisturbed(4));
  expect_whole(here_ / "own");
}

TEST_F(TakingOver, ADeletedCheckpointGivesItsRoomToTheRun) {
  first_run();
  const auto engine = run({here_ / "two", here_ / "one"});
  engine->load(here_ / "two");
  train(*engine, 2, 3);
  engine::remove_save(here_ / "one");
  engine::remove_save(here_ / "two");
  engine->save(here_ / "three", "{}");
  engine::remove_save(here_ / "three");
  engine->save(here_ / "four", "{}");
  engine->synchronize();
  const auto other = run({}, [](Config& config) { config.job = "other"; });
  train(*other, 0, 3);
  EXPECT_EQ(engine->stats().store.allocated_bytes, other->stats().store.allocated_bytes);
}

TEST_F(TakingOver, RunAfterRunNeedsNoMore) {
  first_run();
  std::vector<std::string> kept{"two", "one"};
  for (int number = 0; number < 4; ++number) {
    const auto engine = run({here_ / kept[0], here_ / kept[1]});
    engine->load(here_ / kept[0]);
    train(*engine, 2 + number, 3 + number);
    kept.insert(kept.begin(), fmt::format("run{}", number));
    engine->save(here_ / kept[0], "{}");
    engine::remove_save(here_ / kept.back());
    kept.pop_back();
    EXPECT_LE(engine->stats().store.reserved_bytes, reserved_) << number;
  }
  const auto engine = run({here_ / kept[0], here_ / kept[1]});
  engine->load(here_ / kept[0]);
  EXPECT_EQ(toy_contents(*engine), undisturbed(6));
}

TEST_F(TakingOver, ADamagedNeighbourMakesTheRunTakeNewRoomAndSaySo) {
  first_run();
  std::ofstream(here_ / "one" / engine::kManifestFile) << "{";
  ::testing::internal::CaptureStderr();
  const auto engine = run({here_ / "two", here_ / "one"});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find((here_ / "one").string()), std::string::npos) << said;
  EXPECT_NE(said.find("takes new room"), std::string::npos) << said;
  engine->load(here_ / "two");
  train(*engine, 2, 6);
  EXPECT_EQ(toy_contents(*engine), undisturbed(6));
  expect_whole(here_ / "two");
}

TEST_F(TakingOver, ADamagedCheckpointIsRefusedAndTheOlderOneOpens) {
  first_run();
  const engine::FileRange range = engine::read_manifest(here_ / "two").units[0].pieces[0].range;
  {
    std::fstream file(here_ / "two" / range.file, std::ios::binary | std::ios::in | std::ios::out);
    file.seekg(range.offset);
    const char flipped = static_cast<char>(file.get() ^ 1);
    file.seekp(range.offset);
    file.put(flipped);
  }
  const auto engine = run({here_ / "two", here_ / "one"});
  EXPECT_THROW(engine->load(here_ / "two"), engine::CheckpointError);
  engine->load(here_ / "one");
  train(*engine, 1, 2);
  EXPECT_EQ(toy_contents(*engine), at_two_);
}

TEST_F(TakingOver, WithOneCopyOnlyNothingIsTakenOver) {
  first_run();
  const auto engine =
      run({here_ / "two", here_ / "one"}, [](Config& config) { config.train_after_save = false; });
  engine->load(here_ / "two");
  train(*engine, 2, 6);
  EXPECT_EQ(toy_contents(*engine), undisturbed(6));
  expect_whole(here_ / "one");
  expect_whole(here_ / "two");
}

TEST_F(TakingOver, OtherChunksAreCopied) {
  first_run();
  const auto engine =
      run({here_ / "two", here_ / "one"}, [](Config& config) { config.chunk_elements = 2048; });
  engine->load(here_ / "two");
  EXPECT_EQ(toy_contents(*engine), at_two_);
  train(*engine, 2, 6);
  expect_whole(here_ / "one");
  expect_whole(here_ / "two");
}

TEST_F(TakingOver, PartsOnAnotherDiskAsWell) {
  if (same_file_system(here_, there_)) GTEST_SKIP() << here_ << " and " << there_ << " are one file system";
  paths_ = {here_, there_};
  first_run();
  ASSERT_EQ(io::parts_of(here_ / "two").size(), 1U);
  const auto engine = run({here_ / "two", here_ / "one"});
  const int64_t written = engine->stats().store.bytes_written;
  engine->load(here_ / "two");
  EXPECT_EQ(engine->stats().store.bytes_written, written);
  train(*engine, 2, 8);
  EXPECT_EQ(toy_contents(*engine), undisturbed(8));
  expect_whole(here_ / "one");
  expect_whole(here_ / "two");
  // A part that stays keeps its bytes, and one that goes gives them back.
  const int64_t before = engine->stats().store.allocated_bytes;
  engine::remove_save(here_ / "one");
  engine::remove_save(here_ / "two");
  engine->save(here_ / "three", "{}");
  engine::remove_save(here_ / "three");
  engine->save(here_ / "four", "{}");
  EXPECT_LT(engine->stats().store.allocated_bytes, before);
}

class TakingOverOnAFullDisk : public TakingOver, public ::testing::WithParamInterface<int> {
 protected:
  /// Leaves so many bytes free.
  static void fill(const fs::path& disk, int64_t free) {
    const io::UniqueFd ballast(::open((disk / "ballast").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    ASSERT_EQ(::posix_fallocate(ballast.get(), 0, static_cast<int64_t>(fs::space(disk).available) - free), 0);
  }
};

TEST_P(TakingOverOnAFullDisk, GoesOnWithEveryCheckpointThatIsKept) {
  const int kept = GetParam();
  const auto keep = [kept](Config& config) { config.checkpoints_kept = kept; };
  const int64_t reserved = run({}, keep)->stats().store.reserved_bytes;
  std::unique_ptr<io::LoopDisk> disk;
  try {
    disk = std::make_unique<io::LoopDisk>(here_, "disk", int64_t{64} << 20);
  } catch (const io::NoLoopDisk& why) {
    GTEST_SKIP() << why.what();
  }
  constexpr int64_t kBeside = 400 << 10;  // folders, indexes and manifests
  ASSERT_LT(kBeside, reserved / (2 + kept)) << "not one more copy fits";
  fill(disk->path(), reserved + kBeside);
  paths_ = {disk->path()};
  std::vector<fs::path> checkpoints;
  const auto train_and_save = [&](Engine& engine, int from, int to) {
    for (int step = from; step < to; ++step) {
      train(engine, step, step + 1);
      checkpoints.insert(checkpoints.begin(), disk->path() / fmt::format("step-{}", step + 1));
      engine.save(checkpoints[0], "{}");
      if (std::cmp_less_equal(checkpoints.size(), kept)) continue;
      engine::remove_save(checkpoints.back());
      checkpoints.pop_back();
    }
  };
  {
    const auto engine = run({}, keep);
    train_and_save(*engine, 0, 6);
  }
  EXPECT_THROW(run({}, keep), io::StoreError) << "the disk is larger than the run needs";
  for (int begin = 6; begin < 12; begin += 2) {
    const auto engine = run(checkpoints, keep);
    engine->load(checkpoints[0]);
    train_and_save(*engine, begin, begin + 2);
  }
  const auto engine = run(checkpoints, keep);
  engine->load(checkpoints[0]);
  const std::vector<float> contents = toy_contents(*engine);
  paths_ = {here_};
  EXPECT_EQ(contents, undisturbed(12));
  for (const fs::path& checkpoint : checkpoints) expect_whole(checkpoint);
}

INSTANTIATE_TEST_SUITE_P(Kept, TakingOverOnAFullDisk, ::testing::Values(1, 3));

class TakingOverByRanks : public TakingOver, public ::testing::WithParamInterface<std::tuple<int, int, int>> {
 protected:
  void on(int world, const std::vector<fs::path>& checkpoints, int stage,
          const std::function<void(Engine&, int)>& body) {
    const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      Config config = config_for(checkpoints);
      config.job = fmt::format("over-{}", rank);
      config.stage = stage;
      Engine engine(toy_units(), config,
                    make_resources(toy_units(), config, {"host", "threads", 1}, std::move(ranks)));
      toy_load(engine);
      body(engine, rank);
    });
    for (const std::string& error : errors) ASSERT_EQ(error, "");
  }
};

TEST_P(TakingOverByRanks, OfAsManyRanksOrOthers) {
  const auto [before, after, stage] = GetParam();
  std::vector<float> wanted;
  on(before, {}, stage, [&](Engine& engine, int rank) {
    for (int step = 0; step < 2; ++step) toy_step(engine, step, 1, rank);
    engine.save(here_ / "one", "{}");
    const auto contents = toy_contents(engine);
    if (rank == 0) wanted = contents;
    toy_step(engine, 2, 1, rank);
  });
  const int world = after;
  std::vector<int64_t> written(static_cast<size_t>(world));
  on(world, {here_ / "one"}, stage, [&](Engine& engine, int rank) {
    const int64_t before_load = engine.stats().store.bytes_written;
    engine.load(here_ / "one");
    written[rank] = engine.stats().store.bytes_written - before_load;
    EXPECT_EQ(toy_contents(engine), wanted);
    for (int step = 2; step < 6; ++step) toy_step(engine, step, 1, rank);
    engine.save(here_ / "two", "{}");
  });
  expect_whole(here_ / "one");
  expect_whole(here_ / "two");
  if (before != after || stage == 0) return;
  int64_t in_slabs = 0;
  for (const engine::ManifestUnit& unit : engine::read_manifest(here_ / "one").units) {
    for (const engine::ManifestPiece& piece : unit.pieces)
      in_slabs += piece.range.file.find("slab-") != std::string::npos ? piece.range.bytes : 0;
  }
  // Padding that was never written lies in no slab.
  EXPECT_LT(std::accumulate(written.begin(), written.end(), int64_t{0}), in_slabs / 4);
}

INSTANTIATE_TEST_SUITE_P(Worlds, TakingOverByRanks,
                         ::testing::Values(std::tuple(2, 2, 3), std::tuple(4, 4, 3), std::tuple(2, 2, 0),
                                           std::tuple(4, 2, 3), std::tuple(4, 1, 3), std::tuple(1, 2, 3),
                                           std::tuple(3, 2, 3)));

}  // namespace
}  // namespace overspill::testing
