// What a checkpoint holds of the running engine's disk: linked ones their extents until they are deleted,
// copied ones nothing.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "engine/checkpoint/manifest.h"
#include "engine/resources.h"
#include "io/file_store.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::Config;
using engine::Engine;

fs::path own_folder(const fs::path& parent) {
  fs::path folder = parent / fmt::format("test-of-overspill-shared-test-{}", ::getpid());
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

bool same_file_system(const fs::path& a, const fs::path& b) {
  struct stat one {};
  struct stat other {};
  return ::stat(a.c_str(), &one) == 0 && ::stat(b.c_str(), &other) == 0 && one.st_dev == other.st_dev;
}

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
    // As if both disks were as fast: which of them gets what must not depend on this machine's.
    resources.store.reset();
    resources.store =
        io::make_file_store({.paths = config.nvme,
                             .job = config.job,
                             .backend = io::FileStoreOptions::Backend::threads,
                             .speeds = std::vector<io::PathSpeed>(config.nvme.size(), {1e9, 1e9}),
                             .patience = {},
                             .result_hook = {}});
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

  fs::path here_ = own_folder(fs::temp_directory_path());
  fs::path there_ = own_folder("/dev/shm");
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

TEST_F(SharedCheckpoint, OfTwoDisksHoldsWhatIsLinked) {
  auto engine = trained({here_, there_});
  const int64_t before = allocated(*engine);
  engine->save(here_ / "mixed", "{}");
  const std::vector<float> at_two = toy_contents(*engine);
  int64_t linked = 0, copied = 0;
  for (const engine::ManifestUnit& unit : engine::read_manifest(here_ / "mixed").units) {
    if (unit.optimizer.empty()) continue;  // frozen: no step writes it anew, so there is one of it
    for (const engine::ManifestPiece& piece : unit.pieces)
      (piece.range.file.starts_with("slab-") ? linked : copied) += piece.range.bytes;
  }
  EXPECT_GT(linked, 0);
  EXPECT_GT(copied, 0);
  for (int step = 2; step < 5; ++step) toy_step(*engine, step, 1, 0);
  EXPECT_EQ(allocated(*engine) - before, linked);
  engine->save(here_ / "another", "{}");
  for (int step = 5; step < 8; ++step) toy_step(*engine, step, 1, 0);
  engine->load(here_ / "mixed");
  EXPECT_EQ(toy_contents(*engine), at_two);
  fs::remove_all(here_ / "mixed");
  fs::remove_all(here_ / "another");
  engine->save(there_ / "last", "{}");
  fs::remove_all(there_ / "last");
  engine->save(here_ / "again", "{}");
  fs::remove_all(here_ / "again");
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
