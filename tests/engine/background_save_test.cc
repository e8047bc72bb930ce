// Saves that go on while training does: the checkpoint has the states of its step to the bit, whatever was
// changed meanwhile; a failed one harms nothing, and is told of.
#include "engine/checkpoint/background_save.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/resources.h"
#include "tests/engine/around_store.h"
#include "tests/engine/rank_world.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointError;
using engine::Config;
using engine::Engine;
using engine::Placement;

const engine::WriteBeside kNothingBeside = [](const fs::path&) { return std::string("{}"); };

class InFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("test-of-overspill-background-{}", ::getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

// ---- one rank

using Case = std::tuple<Placement, const char*, bool>;

class BackgroundSaves : public InFolder, public ::testing::WithParamInterface<Case> {
 protected:
  std::unique_ptr<Engine> make(Placement placement, const std::string& backend, const std::string& job,
                               bool speculate = false) {
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = {folder_};
    config.job = job;
    config.threads = 2;
    config.max_grad_norm = 1.0;
    config.chunk_elements = 1024;
    config.placement = placement;
    config.speculate = speculate;
    config.checkpoints_kept = 3;
    config.poison = true;
    const char* device = placement == Placement::device ? "simulated" : "host";
    return std::make_unique<Engine>(toy_units(), config,
                                    make_resources(toy_units(), config, {device, backend, 3}));
  }
};

TEST_P(BackgroundSaves, HaveTheStatesOfTheirStepWhateverComesAfter) {
  const auto [placement, backend, speculate] = GetParam();
  constexpr int kSteps = 12;
  std::vector<std::vector<float>> at;
  {
    auto plain = make(placement, backend, "plain", speculate);
    toy_load(*plain);
    for (int step = 0; step < kSteps; ++step) {
      toy_step(*plain, step, 1, 0);
      at.push_back(toy_contents(*plain));
    }
  }
  {
    auto engine = make(placement, backend, "saving", speculate);
    toy_load(*engine);
    for (int step = 0; step < kSteps; ++step) {
      toy_step(*engine, step, 1, 0);
      if (step % 3 == 0) engine->save_in_background(folder_ / fmt::format("step-{}", step), kNothingBeside);
    }
    engine->wait_for_save();
    EXPECT_FALSE(engine->save_progress().under_way);
    EXPECT_EQ(engine->save_progress().done_bytes, engine->save_progress().bytes);
    EXPECT_EQ(toy_contents(*engine), at.back()) << "training is what it was";
  }
  auto other = make(Placement::host, backend, "other");
  for (int step = 0; step < kSteps; step += 3) {
    other->load(folder_ / fmt::format("step-{}", step));
    EXPECT_EQ(other->stats().step, step + 1);
    EXPECT_EQ(toy_contents(*other), at[static_cast<size_t>(step)]) << "step " << step;
  }
}

TEST_P(BackgroundSaves, AreNotChangedByWhatTheScriptDoesNext) {
  const auto [placement, backend, speculate] = GetParam();
  auto engine = make(placement, backend, "saving", speculate);
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  const std::vector<float> saved = toy_contents(*engine);
  engine->save_in_background(folder_ / "saved", kNothingBeside);
  toy_load(*engine);  // all weights anew
  engine->save_in_background(folder_ / "anew", kNothingBeside);
  engine->load(folder_ / "saved");
  EXPECT_EQ(toy_contents(*engine), saved);
  engine->load(folder_ / "anew");
  EXPECT_NE(toy_contents(*engine), saved);
}

TEST_P(BackgroundSaves, AreWaitedForByClose) {
  const auto [placement, backend, speculate] = GetParam();
  auto engine = make(placement, backend, "saving", speculate);
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  engine->save_in_background(folder_ / "saved", kNothingBeside);
  engine->close();
  EXPECT_EQ(engine::verify_checkpoint(folder_ / "saved", nullptr, nullptr).step, 1);
  EXPECT_FALSE(fs::exists(folder_ / "saved.partial"));
}

INSTANTIATE_TEST_SUITE_P(
    Placements, BackgroundSaves,
    ::testing::Values(Case{Placement::host, "auto", false}, Case{Placement::host, "auto", true},
                      Case{Placement::half, "auto", true}, Case{Placement::half, "threads", false},
                      Case{Placement::nvme, "auto", false}, Case{Placement::nvme, "auto", true},
                      Case{Placement::nvme, "memory", false}, Case{Placement::device, "auto", false}));

/// Its exports wait until they may go on, or fail.
class SlowExports final : public AroundStore {
 public:
  struct Gate {
    std::atomic<bool> open = false;
    std::atomic<bool> fails = false;
    std::atomic<bool> waiting = false;
  };
  SlowExports(std::unique_ptr<io::Store> store, std::shared_ptr<Gate> gate)
      : AroundStore(std::move(store)), gate_(std::move(gate)) {}
  io::Export export_extents(std::span<const io::Extent> extents, const fs::path& folder,
                            io::ExportPace& pace) override {
    gate_->waiting = true;
    while (!gate_->open) std::this_thread::yield();
    if (gate_->fails)
      throw io::StoreError(
          {io::ErrorKind::no_space, io::Operation::write, ENOSPC, folder.string(), 0, 0, ""});
    return AroundStore::export_extents(extents, folder, pace);
  }

 private:
  const std::shared_ptr<Gate> gate_;
};

class SlowSaves : public BackgroundSaves {
 protected:
  std::unique_ptr<Engine> make_slow() {
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = {folder_};
    config.job = "slow";
    config.threads = 2;
    config.chunk_elements = 1024;
    config.placement = Placement::half;
    auto resources = make_resources(toy_units(), config, {"host", "threads", 3});
    resources.store = std::make_unique<SlowExports>(std::move(resources.store), gate_);
    return std::make_unique<Engine>(toy_units(), config, std::move(resources));
  }
  std::shared_ptr<SlowExports::Gate> gate_ = std::make_shared<SlowExports::Gate>();
};

TEST_F(SlowSaves, TrainingGoesOnBeforeTheyAreDone) {
  auto engine = make_slow();
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  const std::vector<float> saved = toy_contents(*engine);
  engine->save_in_background(folder_ / "saved", kNothingBeside);
  for (int step = 1; step < 5; ++step) toy_step(*engine, step, 1, 0);
  EXPECT_TRUE(engine->save_progress().under_way);
  EXPECT_FALSE(fs::exists(folder_ / "saved"));
  gate_->open = true;
  engine->load(folder_ / "saved");
  EXPECT_EQ(toy_contents(*engine), saved);
}

TEST_F(SlowSaves, ThatFailLeaveNothingAndAreToldOfOnce) {
  auto engine = make_slow();
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  gate_->fails = true;
  engine->save_in_background(folder_ / "saved", kNothingBeside);
  toy_step(*engine, 1, 1, 0);
  gate_->open = true;
  EXPECT_THROW(engine->save(folder_ / "next", "{}"), io::StoreError) << "of the one before";
  EXPECT_FALSE(fs::exists(folder_ / "saved"));
  EXPECT_FALSE(fs::exists(folder_ / "saved.partial"));
  EXPECT_FALSE(fs::exists(folder_ / "next"));
  gate_->fails = false;
  engine->save(folder_ / "next", "{}");
  EXPECT_EQ(engine::verify_checkpoint(folder_ / "next", nullptr, nullptr).step, 2);
  gate_->fails = true;
  engine->save_in_background(folder_ / "last", kNothingBeside);
  EXPECT_THROW(engine->close(), io::StoreError);
  EXPECT_NO_THROW(engine->close());
}

TEST_F(SlowSaves, ASecondOneUnderTheSameNameIsRefused) {
  auto engine = make_slow();
  toy_load(*engine);
  engine->save_in_background(folder_ / "saved", kNothingBeside);
  std::thread opening([&] {
    while (!gate_->waiting) std::this_thread::yield();
    gate_->open = true;
  });
  EXPECT_THROW(engine->save_in_background(folder_ / "saved", kNothingBeside), CheckpointError);
  opening.join();
  EXPECT_EQ(engine::verify_checkpoint(folder_ / "saved", nullptr, nullptr).step, 0);
}

// ---- several ranks

class RankSaves : public InFolder, public ::testing::WithParamInterface<int> {};

TEST_P(RankSaves, HaveTheStatesOfTheirStepWhateverComesAfter) {
  constexpr int kSteps = 8;
  const RankOptions options{.stage = GetParam(), .placement = Placement::half};
  std::vector<std::vector<float>> at;
  const auto plain = on_ranks(3, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank(options, std::move(ranks));
    toy_load(*engine);
    for (int step = 0; step < kSteps; ++step) {
      toy_step(*engine, step, 1, rank);
      const std::vector<float> contents = toy_contents(*engine);
      if (rank == 0) at.push_back(contents);
    }
  });
  for (const std::string& error : plain) ASSERT_EQ(error, "");
  const auto errors = on_ranks(3, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    RankOptions own = options;
    own.job = "saving";
    const auto engine = toy_rank(own, std::move(ranks));
    toy_load(*engine);
    for (int step = 0; step < kSteps; ++step) {
      toy_step(*engine, step, 1, rank);
      if (step % 2 == 0) engine->save_in_background(folder_ / fmt::format("step-{}", step), kNothingBeside);
    }
    engine->close();
  });
  for (const std::string& error : errors) ASSERT_EQ(error, "");
  for (int step = 0; step < kSteps; step += 2) {
    const fs::path saved = folder_ / fmt::format("step-{}", step);
    EXPECT_EQ(engine::verify_checkpoint(saved, nullptr, nullptr).step, step + 1);
    EXPECT_FALSE(fs::exists(saved / "rank1-save.txt"));
    for (const int world : {1, 2}) {
      const auto opened = on_ranks(world, [&](int, std::unique_ptr<engine::Communicator> ranks) {
        const auto engine = toy_rank({.stage = 3, .job = "opened"}, std::move(ranks));
        engine->load(saved);
        EXPECT_EQ(toy_contents(*engine), at[static_cast<size_t>(step)]) << "step " << step;
      });
      for (const std::string& error : opened) EXPECT_EQ(error, "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, RankSaves, ::testing::Range(0, 4));

TEST_F(RankSaves, ThatOneRankCannotFinishAreRefusedByAll) {
  const auto errors = on_ranks(3, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    RankOptions options{.stage = 3, .placement = Placement::half};
    if (rank == 1) options.job = "fails";
    const auto engine = toy_rank(options, std::move(ranks));
    toy_load(*engine);
    toy_step(*engine, 0, 1, rank);
    engine->save_in_background(folder_ / "saved", [&](const fs::path& folder) {
      // In the way of what rank 1 moves up.
      fs::create_directories(folder / "rank1-resident.bin" / "full");
      return std::string("{}");
    });
    toy_step(*engine, 1, 1, rank);
    try {
      engine->wait_for_save();
      ADD_FAILURE() << "rank " << rank << " took it for saved";
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find("rank1-resident.bin"), std::string::npos) << error.what();
    }
    toy_step(*engine, 2, 1, rank);
    engine->save(folder_ / "second", "{}");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_FALSE(fs::exists(folder_ / "saved"));
  EXPECT_EQ(engine::verify_checkpoint(folder_ / "second", nullptr, nullptr).step, 3);
}

}  // namespace
}  // namespace overspill::testing
