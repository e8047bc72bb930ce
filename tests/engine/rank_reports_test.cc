// What the ranks of a save in the background hear of one another.
#include "engine/checkpoint/rank_reports.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/engine_failed.h"
#include "engine/checkpoint/manifest.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointError;

class Reports : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("test-of-overspill-reports-{}", ::getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

TEST_F(Reports, OfARankThatDiedAreKnown) {
  const auto go_on = [] {};
  engine::RankReports first(folder_, 0, 2);
  { const engine::RankReports dies(folder_, 1, 2); }
  try {
    static_cast<void>(first.gather(go_on));
    ADD_FAILURE() << "it was not missed";
  } catch (const CheckpointError& error) {
    EXPECT_EQ(std::string(error.what()), "rank 1: it ended before it had written its part");
  }
}

TEST_F(Reports, OfAllRanksAreTheirWords) {
  const auto go_on = [] {};
  engine::RankReports first(folder_, 0, 2);
  engine::RankReports second(folder_, 1, 2);
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    second.say_written("a b");
  });
  EXPECT_EQ(first.gather(go_on), (std::vector<std::string>{"", "a b"}));
  late.join();
  first.remove_others();
  first.remove_own(folder_);
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(Reports, ThatSayWhyAreTold) {
  const auto go_on = [] {};
  engine::RankReports first(folder_, 0, 2);
  engine::RankReports second(folder_, 1, 2);
  second.say_failed("no room\non the disk");
  try {
    static_cast<void>(first.gather(go_on));
    ADD_FAILURE() << "it was not heard";
  } catch (const CheckpointError& error) {
    EXPECT_EQ(std::string(error.what()), "rank 1: no room on the disk");
  }
}

TEST_F(Reports, AWaitForTheNameEndsWithTheName) {
  const fs::path partial = folder_ / "saved.partial", saved = folder_ / "saved";
  fs::create_directory(partial);
  const engine::RankReports first(partial, 0, 2), second(partial, 1, 2);
  int looks = 0;
  second.wait_for_name(saved, [&] {
    if (++looks < 3) return;
    std::ofstream(partial / engine::kManifestFile) << "{}";
    fs::rename(partial, saved);
  });
  EXPECT_EQ(looks, 3);
}

TEST_F(Reports, AWaitForTheNameEndsWithRankZero) {
  const auto go_on = [] {};
  engine::RankReports second(folder_, 1, 2);
  const auto said = [&] {
    try {
      second.wait_for_name(folder_ / "saved", go_on);
    } catch (const CheckpointError& error) {
      return std::string(error.what());
    }
    return std::string("it has its name");
  };
  {
    engine::RankReports first(folder_, 0, 2);
    first.say_failed("rank 1: no room");
    EXPECT_EQ(said(), "rank 1: no room");
    first.say_failed("no room");
    EXPECT_EQ(said(), "rank 0: no room");
    fs::remove(folder_ / "rank0-save.txt");
  }
  { const engine::RankReports dies(folder_, 0, 2); }
  EXPECT_EQ(said(), "rank 0: it ended before it had written its part");
}

TEST_F(Reports, RankZeroLeavesLast) {
  const engine::RankReports first(folder_, 0, 2);
  auto second = std::make_unique<engine::RankReports>(folder_, 1, 2);
  int looks = 0;
  first.wait_for_others([&] {
    if (++looks == 3) second.reset();
  });
  EXPECT_EQ(looks, 3);
}

TEST_F(Reports, AnEngineThatFailedWaitsForNobody) {
  engine::RankReports first(folder_, 0, 2);
  const engine::RankReports second(folder_, 1, 2);
  const auto give_up = [] { throw engine::EngineFailed("rank 1 is gone"); };
  EXPECT_THROW(static_cast<void>(first.gather(give_up)), engine::EngineFailed);
}

}  // namespace
}  // namespace overspill::testing
