// A checkpoint into an engine that has made no step: each byte is read once, and a damaged one leaves an
// engine that does nothing until another load comes through.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "tests/engine/rank_world.h"
#include "tests/test_folders.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointError;
using engine::Engine;
using engine::Placement;

std::string refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "it was done";
}

/// What this process has asked files for so far, in bytes.
int64_t asked_of_files() {
  std::ifstream file("/proc/self/io");
  for (std::string name; file >> name;) {
    int64_t value = 0;
    file >> value;
    if (name == "rchar:") return value;
  }
  return -1;
}

class LoadOnce : public ::testing::TestWithParam<Placement> {
 protected:
  void SetUp() override { folder_ = empty_folder(fs::temp_directory_path(), "load-once"); }
  void TearDown() override { fs::remove_all(folder_); }

  /// Two steps, a checkpoint after each.
  void save(int world, const RankOptions& options) {
    const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const auto engine = toy_rank(options, std::move(ranks));
      toy_load(*engine);
      toy_step(*engine, 0, 1, rank);
      engine->save(folder_ / "first", R"({"n": 1})");
      toy_step(*engine, 1, 1, rank);
      engine->save(folder_ / "second", R"({"n": 2})");
      if (rank == 0)
        at_second_ = toy_contents(*engine);
      else
        toy_contents(*engine);
    });
    for (const std::string& error : errors) ASSERT_EQ(error, "");
  }

  fs::path folder_;
  std::vector<float> at_second_;
};

TEST_P(LoadOnce, OneThatMeetsDamageLeavesAnEngineThatDoesNothingUntilAnotherComesThrough) {
  save(2, {.stage = 3, .placement = Placement::host});
  // The end of the last rank's file: most is loaded when it is met.
  const fs::path damaged = folder_ / "first" / "rank1-resident.bin";
  flip_a_bit(damaged, static_cast<int64_t>(fs::file_size(damaged)) - 5000);
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({.stage = 2, .placement = GetParam(), .job = "opened"}, std::move(ranks));
    toy_load(*engine);
    EXPECT_NE(refusal_of([&] { engine->load(folder_ / "first"); }).find("rank1-resident.bin"),
              std::string::npos);

    const auto expect_says_so = [&](const std::function<void()>& call) {
      const std::string said = refusal_of(call);
      EXPECT_NE(said.find("first was loaded before damage was found"), std::string::npos) << said;
    };
    expect_says_so([&] { toy_step(*engine, 0, 1, rank); });
    expect_says_so([&] { toy_contents(*engine); });
    expect_says_so([&] { engine->save(folder_ / "mixed", "{}"); });
    EXPECT_EQ(engine->stats().step, 0);
    EXPECT_NE(refusal_of([&] { engine->load(folder_ / "first"); }).find("rank1-resident.bin"),
              std::string::npos);

    EXPECT_EQ(engine->load(folder_ / "second"), R"({"n": 2})");
    EXPECT_EQ(toy_contents(*engine), at_second_);
    toy_step(*engine, 2, 1, rank);
    engine->save(folder_ / "third", "{}");
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_FALSE(fs::exists(folder_ / "mixed"));
  EXPECT_EQ(engine::verify_checkpoint(folder_ / "third", nullptr, nullptr).step, 3);
}

TEST_P(LoadOnce, WhatAnEngineWasGivenSinceItWasMadeIsNotLost) {
  save(1, {.stage = 0, .placement = Placement::host});
  flip_a_bit(folder_ / "first" / "resident.bin", 100);
  const auto errors = on_ranks(1, [&](int, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({.stage = 0, .placement = GetParam(), .job = "opened"}, std::move(ranks));
    toy_load(*engine);
    const engine::Segment& segment = engine->layout().units[0].segments[0];
    const std::vector<float> given(static_cast<size_t>(segment.elements), 0.5F);
    engine->load_weight(0, 0, std::as_bytes(std::span(given)), "F32");
    const std::vector<float> before = toy_contents(*engine);
    EXPECT_NE(refusal_of([&] { engine->load(folder_ / "first"); }).find("resident.bin"), std::string::npos);
    EXPECT_EQ(toy_contents(*engine), before);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST_P(LoadOnce, ReadsEachByteOnceAndAllOfThemTwiceWhereStepsCouldBeLost) {
  save(1, {.stage = 0, .placement = Placement::host});
  const auto bytes = static_cast<double>(fs::file_size(folder_ / "second" / "resident.bin"));
  const auto errors = on_ranks(1, [&](int, std::unique_ptr<engine::Communicator> ranks) {
    // The store is in memory: the process reads no other file meanwhile.
    const auto engine = toy_rank({.stage = 0, .placement = GetParam(), .job = "opened"}, std::move(ranks));
    toy_load(*engine);
    const auto asked = [&] {
      const int64_t before = asked_of_files();
      engine->load(folder_ / "second");
      return static_cast<double>(asked_of_files() - before) / bytes;
    };
    const double once = asked(), twice = asked();
    EXPECT_GT(once, 0.95);
    EXPECT_LT(once, 1.3) << "manifest and pages at the ends of pieces are a tenth in a model this small";
    EXPECT_GT(twice, 1.9);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

INSTANTIATE_TEST_SUITE_P(Placements, LoadOnce,
                         ::testing::Values(Placement::host, Placement::half, Placement::nvme),
                         [](const auto& info) { return std::string(placement_name(info.param)); });

}  // namespace
}  // namespace overspill::testing
