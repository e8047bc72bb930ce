// What a checkpoint holds of the running engine's disk: linked ones their extents until they are deleted,
// copied ones nothing.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "engine/checkpoint/copy.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/resources.h"
#include "io/part_folder.h"
#include "tests/engine/equal_store.h"
#include "tests/engine/toy_model.h"
#include "tests/test_folders.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::Config;
using engine::Engine;

class SharedCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    if (same_file_system(here_, there_)) GTEST_SKIP() << here_ << " and " << there_ << " are one file system";
  }
  void TearDown() override {
    fs::remove_all(here_);
    fs::remove_all(there_);
  }

  std::unique_ptr<Engine> trained(
      std::vector<fs::path> paths, const std::function<void(Config&)>& change = [](Config&) {}) const {
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = std::move(paths);
    config.job = "shared";
    config.threads = 1;
    config.chunk_elements = 4096;
    config.checkpoints_kept = 2;
    config.placement = engine::Placement::nvme;
    change(config);
    engine::Resources resources = make_resources(toy_units(), config, {"host", "threads", 1});
    resources.store.reset();
    resources.store = equally_fast_store(config);
    auto engine = std::make_unique<Engine>(toy_units(), config, std::move(resources));
    toy_load(*engine);
    for (int step = 0; step < 2; ++step) toy_step(*engine, step, 1, 0);
    engine->synchronize();
    return engine;
  }

  static int64_t allocated(Engine& engine) {
    engine.synchronize();
    return engine.stats().store.allocated_bytes;
  }

  fs::path here_ = empty_folder(fs::temp_directory_path(), "shared-test");
  fs::path there_ = empty_folder("/dev/shm", "shared-test");
};

TEST_F(SharedCheckpoint, OnAnotherDiskHoldsNothingHere) {
  auto engine = trained({here_});
  const int64_t before = allocated(*engine), reserved = engine->stats().store.reserved_bytes;
  for (int step = 2; step < 8; ++step) {
    engine->save(there_ / fmt::format("ck{}", step), "{}");
    toy_step(*engine, step, 1, 0);
    EXPECT_EQ(allocated(*engine), before) << step;
  }
  EXPECT_EQ(engine->stats().store.reserved_bytes, reserved);
}

TEST_F(SharedCheckpoint, OnAnotherDiskEndsNoTraining) {
  auto engine = trained({here_}, [](Config& config) { config.train_after_save = false; });
  engine->save(there_ / "copied", "{}");
  toy_step(*engine, 2, 1, 0);
  engine->save(here_ / "linked", "{}");
  EXPECT_THROW(toy_step(*engine, 3, 1, 0), engine::CheckpointError);
}

TEST_F(SharedCheckpoint, OfTwoDisksIsLinkedOnBoth) {
  auto engine = trained({here_, there_});
  const int64_t before = allocated(*engine);
  engine->save(here_ / "both", "{}");
  const std::vector<float> at_two = toy_contents(*engine);
  const std::vector<io::PartFolder> parts = io::parts_of(here_ / "both");
  ASSERT_EQ(parts.size(), 1U);
  EXPECT_EQ(parts[0].path.parent_path(), there_);
  int64_t linked = 0, in_the_part = 0;
  for (const engine::ManifestUnit& unit : engine::read_manifest(here_ / "both").units) {
    for (const engine::ManifestPiece& piece : unit.pieces) {
      const std::string& file = piece.range.file;
      EXPECT_NE(file.find("slab-"), std::string::npos) << file << " was copied";
      if (file.starts_with(parts[0].id + "/")) in_the_part += piece.range.bytes;
      if (!unit.optimizer.empty()) linked += piece.range.bytes;  // a frozen one is never written anew
    }
  }
  EXPECT_GT(in_the_part, 0);
  EXPECT_LT(in_the_part, linked);
  for (int step = 2; step < 5; ++step) toy_step(*engine, step, 1, 0);
  EXPECT_EQ(allocated(*engine) - before, linked);
  EXPECT_EQ(engine::verify_checkpoint(here_ / "both", nullptr, nullptr).step, 2);
  fs::rename(here_ / "both", here_ / "moved");
  engine->load(here_ / "moved");
  EXPECT_EQ(toy_contents(*engine), at_two);
  // A copy needs no part.
  fs::create_directory(there_ / "copy");
  engine::copy_checkpoint(here_ / "moved", there_ / "copy", nullptr, nullptr);
  EXPECT_TRUE(io::parts_of(there_ / "copy").empty());
  engine::remove_save(here_ / "moved");
  EXPECT_FALSE(fs::exists(parts[0].path));
  engine->save(here_ / "another", "{}");
  EXPECT_LE(allocated(*engine), before) << "what was removed holds nothing";
  engine->load(there_ / "copy");
  EXPECT_EQ(toy_contents(*engine), at_two);
}

TEST_F(SharedCheckpoint, HoldsItsExtentsWhileAPartIsThere) {
  auto engine = trained({here_, there_});
  const int64_t before = allocated(*engine);
  engine->save(here_ / "both", "{}");
  const fs::path part = io::parts_of(here_ / "both").at(0).path;
  fs::remove_all(here_ / "both");  // by somebody who knows of no part
  for (int step = 2; step < 5; ++step) toy_step(*engine, step, 1, 0);
  engine->save(here_ / "next", "{}");
  EXPECT_GT(allocated(*engine), before) << "the part may be of a checkpoint that was moved";
  engine::remove_save(here_ / "next");
  fs::remove_all(part);
  engine->save(here_ / "last", "{}");
  EXPECT_EQ(allocated(*engine), before);
}

TEST_F(SharedCheckpoint, WithoutItsPartIsRefusedByName) {
  auto engine = trained({here_, there_});
  engine->save(here_ / "both", "{}");
  const io::PartFolder part = io::parts_of(here_ / "both").at(0);
  const auto refusal = [&] {
    try {
      engine->load(here_ / "both");
      return std::string("loaded");
    } catch (const engine::CheckpointError& error) {
      return std::string(error.what());
    }
  };
  fs::rename(part.path, there_ / "elsewhere");
  EXPECT_NE(refusal().find(part.path.string()), std::string::npos) << refusal();
  EXPECT_NE(refusal().find("part-" + part.id + ".txt"), std::string::npos) << refusal();
  fs::create_directory(part.path);  // another folder of that name is no part
  std::ofstream(part.path / "notes.txt") << "of somebody else";
  EXPECT_NE(refusal(), "loaded");
  engine::remove_save(here_ / "both");
  EXPECT_TRUE(fs::exists(there_ / "elsewhere")) << "what is not where the checkpoint says is not removed";
  EXPECT_TRUE(fs::exists(part.path / "notes.txt"));
}

TEST_F(SharedCheckpoint, WhoseDiskIsMountedElsewhereOpensWhenItSaysSo) {
  auto engine = trained({here_, there_});
  engine->save(here_ / "both", "{}");
  const std::vector<float> at_two = toy_contents(*engine);
  const io::PartFolder part = io::parts_of(here_ / "both").at(0);
  fs::rename(part.path, there_ / "elsewhere");
  std::ofstream(here_ / "both" / ("part-" + part.id + ".txt")) << (there_ / "elsewhere").string() << "\n";
  toy_step(*engine, 2, 1, 0);
  engine->load(here_ / "both");
  EXPECT_EQ(toy_contents(*engine), at_two);
}

TEST_F(SharedCheckpoint, ThatFailsLeavesNoPart) {
  auto engine = trained({here_, there_});
  EXPECT_ANY_THROW(engine->save(here_ / "both",
                                [](const fs::path&) -> std::string { throw std::runtime_error("no more"); }));
  for (const auto& entry : fs::directory_iterator(there_))
    EXPECT_FALSE(entry.path().filename().string().starts_with("checkpoint-")) << entry.path();
  EXPECT_FALSE(fs::exists(here_ / "both.partial"));
}

TEST_F(SharedCheckpoint, InTheBackgroundIsLinkedOnBothToo) {
  auto engine = trained({here_, there_});
  const std::vector<float> at_two = toy_contents(*engine);
  engine->save_in_background(here_ / "both", [](const fs::path&) { return std::string("{}"); });
  for (int step = 2; step < 5; ++step) toy_step(*engine, step, 1, 0);
  engine->load(here_ / "both");
  EXPECT_EQ(toy_contents(*engine), at_two);
  EXPECT_EQ(io::parts_of(here_ / "both").size(), 1U);
}

TEST_F(SharedCheckpoint, WhoseFolderIsGoneIsNamedWhenARunStarts) {
  fs::path part;
  {
    auto engine = trained({here_, there_});
    engine->save(here_ / "both", "{}");
    part = io::parts_of(here_ / "both").at(0).path;
    EXPECT_TRUE(io::orphans(there_).empty());
  }
  fs::remove_all(here_ / "both");
  ::testing::internal::CaptureStderr();
  trained({here_, there_});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find(part.string()), std::string::npos) << said;
  EXPECT_NE(said.find((here_ / "both").string()), std::string::npos) << said;
}

/// As a power cut leaves it that keeps the names of the slabs and not that of the id.
TEST_F(SharedCheckpoint, WhosePartACrashLeftWithoutItsIdIsNamedWhenARunStarts) {
  fs::path part;
  {
    auto engine = trained({here_, there_});
    engine->save(here_ / "both", "{}");
    part = io::parts_of(here_ / "both").at(0).path;
  }
  fs::remove_all(here_ / "both");
  fs::remove(part / "overspill-part.txt");
  ::testing::internal::CaptureStderr();
  trained({here_, there_});
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find(part.string()), std::string::npos) << said;
  EXPECT_NE(said.find("remove it"), std::string::npos) << said;
}

// Whatever a save lacks descriptors for: it is taken or refused, and nothing stays pinned for a folder that
// is not there.
TEST_F(SharedCheckpoint, WithoutDescriptorsIsRefusedAndHoldsNothing) {
  auto engine = trained({here_});
  const int64_t before = allocated(*engine);
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
  const int next_fd = ::dup(0);  // the lowest that is free
  ::close(next_fd);
  int refused = 0, step = 2;
  for (bool taken = false; !taken; ++step) {
    const rlimit few{static_cast<rlim_t>(next_fd + step - 2), usual.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    try {
      engine->save(here_ / "few", "{}");
      taken = true;
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find("Too many open files"), std::string::npos) << error.what();
      ++refused;
    }
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
    fs::remove_all(here_ / "few");
    toy_step(*engine, step, 1, 0);
    engine->synchronize();
    ASSERT_LT(refused, 20);
  }
  EXPECT_GT(refused, 1);
  engine->save(here_ / "one", "{}");
  fs::remove_all(here_ / "one");
  toy_step(*engine, step, 1, 0);
  engine->save(there_ / "two", "{}");
  EXPECT_EQ(allocated(*engine), before);
}

// As tools do that move a folder to another disk file by file: the manifest may go before the slabs are
// copied.
TEST_F(SharedCheckpoint, KeepsItsBytesUntilItsSlabsAreGone) {
  auto engine = trained({here_});
  engine->save(here_ / "moving", "{}");
  const std::vector<float> at_two = toy_contents(*engine);
  fs::create_directory(there_ / "moved");
  const auto shell = [&](const std::string& command) {
    const std::string whole = fmt::format("cd '{}' && {}", (here_ / "moving").string(), command);
    ASSERT_EQ(::system(whole.c_str()), 0) << whole;
  };
  const std::string moved = (there_ / "moved").string();
  shell(fmt::format("cp manifest.json shared* '{}' && rm manifest.json shared*", moved));
  for (int step = 2; step < 6; ++step) {
    toy_step(*engine, step, 1, 0);
    engine->save(here_ / "next", "{}");
    fs::remove_all(here_ / "next");
  }
  shell(fmt::format("cp * '{}'", moved));
  engine->load(there_ / "moved");
  EXPECT_EQ(toy_contents(*engine), at_two);
}

/// Two that are moved at once, in different orders: the mark that is left of one does not stand for a slab of
/// the other.
TEST_F(SharedCheckpoint, KeepsItsBytesWhileAnotherIsTakenApart) {
  auto engine = trained({here_});
  engine->save(here_ / "one", "{}");
  const std::vector<float> at_two = toy_contents(*engine);
  toy_step(*engine, 2, 1, 0);
  engine->save(here_ / "two", "{}");
  const std::string command = fmt::format("cd '{}' && rm two/slab-* one/shared*", here_.string());
  ASSERT_EQ(::system(command.c_str()), 0);
  for (int step = 3; step < 6; ++step) {
    toy_step(*engine, step, 1, 0);
    engine->save(here_ / "next", "{}");
    fs::remove_all(here_ / "next");
  }
  engine->load(here_ / "one");
  EXPECT_EQ(toy_contents(*engine), at_two);
}

TEST_F(SharedCheckpoint, CopiedByCpOpensWhateverHappensToTheFirst) {
  auto engine = trained({here_});
  engine->save(here_ / "first", "{}");
  const std::vector<float> at_two = toy_contents(*engine);
  for (const char* how : {"cp -r", "cp -al", "cp -a --reflink=auto"}) {
    const std::string command = fmt::format("cd '{}' && rm -rf copy && {} first copy", here_.string(), how);
    ASSERT_EQ(::system(command.c_str()), 0);
    for (int step = 2; step < 5; ++step) toy_step(*engine, step, 1, 0);
    engine->load(here_ / "copy");
    EXPECT_EQ(toy_contents(*engine), at_two) << how;
  }
}

}  // namespace
}  // namespace overspill::testing
