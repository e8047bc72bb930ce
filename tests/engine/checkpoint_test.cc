// Saving, going on and coming back: bit-equal, complete or absent, other models refused; what a failing store
// does to the engine.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "engine/checkpoint/index_file.h"
#include "engine/checkpoint/manifest.h"
#include "engine/resources.h"
#include "io/memory_store.h"
#include "io/unique_fd.h"
#include "tests/engine/toy_model.h"
#include "tests/test_folders.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::CheckpointError;
using engine::Config;
using engine::Engine;
using engine::Placement;

class Checkpoint : public ::testing::TestWithParam<std::tuple<Placement, const char*>> {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("test-of-overspill-checkpoint-test-{}", ::getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::unique_ptr<Engine> make(
      Placement placement, const std::string& backend, const std::string& job = "a",
      const std::function<void(Config&)>& change = [](Config&) {}) {
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = {folder_};
    config.job = job;
    config.threads = 2;
    config.max_grad_norm = 1.0;
    config.chunk_elements = 4096;
    config.placement = placement;
    config.poison = true;
    change(config);
    const char* device = placement == Placement::device ? "simulated" : "host";
    return std::make_unique<Engine>(toy_units(), config,
                                    make_resources(toy_units(), config, {device, backend, 3}));
  }

  fs::path folder_;
};

TEST_P(Checkpoint, GoingOnFromItIsGoingOn) {
  const auto [placement, backend] = GetParam();
  auto first = make(placement, backend);
  toy_load(*first);
  for (int step = 0; step < 5; ++step) toy_step(*first, step, 1, 0);
  first->save(folder_ / "five", R"({"note": "five"})");
  const std::vector<float> at_five = toy_contents(*first);
  std::vector<double> losses;
  for (int step = 5; step < 10; ++step) losses.push_back(toy_step(*first, step, 1, 0).loss);
  const std::vector<float> at_ten = toy_contents(*first);
  first.reset();  // its files are gone now; the checkpoint's are not

  for (Placement other : {Placement::host, Placement::half, Placement::nvme, Placement::device}) {
    auto second = make(other, backend, "b");
    EXPECT_EQ(second->load(folder_ / "five"), R"({"note": "five"})");
    EXPECT_EQ(second->stats().step, 5);
    EXPECT_EQ(toy_contents(*second), at_five);
    for (int step = 5; step < 10; ++step) EXPECT_EQ(toy_step(*second, step, 1, 0).loss, losses[step - 5]);
    EXPECT_EQ(toy_contents(*second), at_ten);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Placements, Checkpoint,
    ::testing::Values(std::tuple{Placement::host, "auto"}, std::tuple{Placement::device, "auto"},
                      std::tuple{Placement::half, "auto"}, std::tuple{Placement::nvme, "auto"},
                      std::tuple{Placement::nvme, "threads"}, std::tuple{Placement::half, "memory"}));

using Checkpoints = Checkpoint;

TEST_F(Checkpoints, KeepTheirBytesWhileTrainingGoesOnAndWhenMoved) {
  auto engine = make(Placement::nvme, "auto");
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  engine->save(folder_ / "one", "{}");
  const std::vector<float> at_one = toy_contents(*engine);
  fs::rename(folder_ / "one", folder_ / "moved");
  for (int step = 1; step < 20; ++step) toy_step(*engine, step, 1, 0);
  engine->save(folder_ / "twenty", "{}");
  for (int step = 20; step < 30; ++step) toy_step(*engine, step, 1, 0);
  auto other = make(Placement::host, "auto", "b");
  other->load(folder_ / "moved");
  EXPECT_EQ(toy_contents(*other), at_one);
}

TEST_F(Checkpoints, GiveTheirSpaceBackWhenDeleted) {
  auto engine = make(Placement::nvme, "auto");
  toy_load(*engine);
  int64_t reserved = 0;
  for (int step = 0; step < 12; ++step) {
    toy_step(*engine, step, 1, 0);
    engine->save(folder_ / "last", "{}");
    if (step == 2) reserved = engine->stats().store.reserved_bytes;
    fs::remove_all(folder_ / "last");
  }
  EXPECT_EQ(engine->stats().store.reserved_bytes, reserved);
}

TEST_F(Checkpoints, OnOneCopysRoomTrainingEndsWithTheSave) {
  auto roomy = make(Placement::nvme, "auto", "roomy");
  auto engine = make(Placement::nvme, "auto", "a", [](Config& config) { config.train_after_save = false; });
  const engine::Plan& plan = engine->plan();
  EXPECT_EQ(roomy->plan().nvme_reserve_bytes - plan.nvme_reserve_bytes, 2 * plan.kept_nvme_bytes());
  const int64_t behind = 2 * plan.ring_slots * plan.ring_slot_bytes + plan.gradients_nvme_bytes +
                         plan.staging_buffers * plan.staging_buffer_bytes;
  EXPECT_EQ(plan.nvme_reserve_bytes, plan.kept_nvme_bytes() + behind);
  roomy.reset();
  toy_load(*engine);
  for (int step = 0; step < 20; ++step) toy_step(*engine, step, 1, 0);
  const std::vector<float> at_twenty = toy_contents(*engine);
  engine->save(folder_ / "last", "{}");
  const int64_t reserved = engine->stats().store.reserved_bytes;
  try {
    toy_step(*engine, 20, 1, 0);
    FAIL() << "the checkpoint holds the only room there is";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find((folder_ / "last").string()), std::string::npos);
  }
  EXPECT_THROW(engine->load(folder_ / "last"), CheckpointError);
  EXPECT_EQ(toy_contents(*engine), at_twenty) << "nothing was changed";
  engine->save(folder_ / "again", "{}");
  fs::remove_all(folder_ / "last");
  EXPECT_THROW(toy_step(*engine, 20, 1, 0), CheckpointError) << "the other one holds it still";
  fs::remove_all(folder_ / "again");
  engine->clear_gradients();
  for (int step = 20; step < 40; ++step) toy_step(*engine, step, 1, 0);
  EXPECT_EQ(engine->stats().store.reserved_bytes, reserved);
}

TEST_F(Checkpoints, AreRefusedBeforeAnythingChanges) {
  auto engine = make(Placement::half, "auto");
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  engine->save(folder_ / "good", "{}");
  const std::vector<float> before = toy_contents(*engine);

  EXPECT_THROW(engine->save(folder_ / "good", "{}"), engine::CheckpointError)
      << "a checkpoint is not overwritten";
  EXPECT_THROW(engine->load(folder_ / "absent"), engine::CheckpointError);

  fs::copy(folder_ / "good", folder_ / "truncated", fs::copy_options::recursive);
  fs::resize_file(folder_ / "truncated" / "resident.bin",
                  fs::file_size(folder_ / "truncated" / "resident.bin") / 2);
  EXPECT_THROW(engine->load(folder_ / "truncated"), engine::CheckpointError);

  fs::copy(folder_ / "good", folder_ / "flipped", fs::copy_options::recursive);
  flip_a_bit(folder_ / "flipped" / "resident.bin", 100);
  EXPECT_THROW(engine->load(folder_ / "flipped"), engine::CheckpointError);

  std::vector<engine::UnitSpec> other_model = toy_units();
  other_model[1].segments[0].shape = {32, 128};
  Config config;
  config.host_budget_bytes = 64 << 20;
  Engine other(other_model, config, make_resources(other_model, config, {}));
  try {
    other.load(folder_ / "good");
    FAIL() << "a checkpoint of another model was taken";
  } catch (const engine::CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("block0.a"), std::string::npos) << error.what();
  }
  EXPECT_EQ(toy_contents(*engine), before);
}

TEST_F(Checkpoints, TooLargeForAnyReaderAreRefusedBeforeAnythingIsWritten) {
  auto small = make(Placement::half, "threads", "small");
  toy_load(*small);
  small->save(folder_ / "small", "{}");
  const auto text = static_cast<int64_t>(fs::file_size(folder_ / "small" / engine::kManifestFile));
  const auto index = static_cast<int64_t>(fs::file_size(folder_ / "small" / engine::kIndexFile));

  for (const int64_t most : {text / 2, index / 2}) {  // both are seen at the start
    ::testing::internal::CaptureStderr();
    auto engine =
        make(Placement::half, "threads", "large", [&](Config& config) { config.manifest_bytes_max = most; });
    const std::string warned = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(warned.find(std::to_string(most)), std::string::npos) << warned;
    toy_load(*engine);
    try {
      engine->save(folder_ / "large", "{}");
      ADD_FAILURE() << "saved";
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(most)), std::string::npos) << error.what();
    }
    EXPECT_FALSE(fs::exists(folder_ / "large"));
    EXPECT_FALSE(fs::exists(folder_ / "large.partial"));
    toy_step(*engine, 0, 1, 0);
  }
  ::testing::internal::CaptureStderr();
  auto engine = make(Placement::half, "threads", "large",
                     [&](Config& config) { config.manifest_bytes_max = 3 * std::max(text, index); });
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  toy_load(*engine);
  engine->save(folder_ / "large", "{}");
}

TEST_F(Checkpoints, AFailedSaveLeavesNothingAndTrainingGoesOn) {
  auto engine = make(Placement::nvme, "auto");
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  std::ofstream(folder_ / "a-file") << "in the way";
  EXPECT_ANY_THROW(engine->save(folder_ / "a-file" / "below", "{}"));
  EXPECT_FALSE(fs::exists(folder_ / "below.partial"));
  EXPECT_EQ(toy_step(*engine, 1, 1, 0).result.step, 2);
  engine->save(folder_ / "new" / "folders" / "good/", "{}");  // a trailing slash, as a shell completes it
  EXPECT_NO_THROW(engine::read_manifest(folder_ / "new" / "folders" / "good"));
}

/// The names of everything in a folder, and what the files there hold.
std::map<std::string, std::string> everything_in(const fs::path& folder) {
  std::map<std::string, std::string> all;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    std::string& content = all[fs::relative(entry.path(), folder).string()];
    std::ifstream file(entry.path(), std::ios::binary);
    if (entry.is_regular_file()) content.assign(std::istreambuf_iterator<char>(file), {});
  }
  return all;
}

void make_file(const fs::path& path, const std::string& content = "a file") {
  fs::create_directories(path.parent_path());
  std::ofstream(path) << content;
}

TEST_F(Checkpoints, ASaveRemovesNothingThatNoSaveHasPutThere) {
  auto engine = make(Placement::nvme, "auto");
  toy_load(*engine);
  const fs::path partial = folder_ / "good.partial", elsewhere = folder_ / "elsewhere";
  make_file(elsewhere / "resident.bin");
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"notes.txt", [&] { make_file(partial / "notes.txt"); }},
      {"slab-measurements", [&] { make_file(partial / "slab-measurements" / "slab-1.bin"); }},
      {"rank1", [&] { make_file(partial / "rank1" / "photo.jpg"); }},
      {"rank0", [&] { fs::create_directories(partial / "rank0" / "resident.bin"); }},
      {"rank2", [&] { make_file(partial / "rank2"); }},
      {"manifest.json", [&] { fs::create_directories(partial / "manifest.json"); }},
      {"resident.bin",
       [&] {
         fs::create_directories(partial);
         fs::create_symlink(elsewhere / "resident.bin", partial / "resident.bin");
       }},
      {"rank3",
       [&] {
         fs::create_directories(partial);
         fs::create_directory_symlink(elsewhere, partial / "rank3");
       }},
      {"a symbolic link", [&] { fs::create_directory_symlink(elsewhere, partial); }},
      {"a file", [&] { make_file(partial); }},
  };
  for (const auto& [name, put] : cases) {
    SCOPED_TRACE(name);
    put();
    if (fs::is_directory(fs::symlink_status(partial))) make_file(partial / "slab-a-0.bin");
    const auto before = everything_in(folder_);
    try {
      engine->save(folder_ / "good", "{}");
      ADD_FAILURE() << "saved";
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(partial.string()), std::string::npos) << error.what();
    }
    EXPECT_EQ(everything_in(folder_), before);
    fs::remove_all(partial);
  }
  engine->save(folder_ / "good", "{}");
}

TEST_F(Checkpoints, ASaveThatAnotherProcessHasUnderWayIsLeftAlone) {
  const auto engine = make(Placement::nvme, "auto");
  toy_load(*engine);
  const fs::path partial = folder_ / "good.partial";
  make_file(partial / "resident.bin");
  {
    const io::UniqueFd other(::open(partial.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    ASSERT_EQ(::flock(other.get(), LOCK_EX | LOCK_NB), 0);
    try {
      engine->save(folder_ / "good", "{}");
      FAIL() << "it took the other one's folder";
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find("another save"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(partial.string()), std::string::npos) << error.what();
    }
    EXPECT_TRUE(fs::exists(partial / "resident.bin"));
  }
  engine->save(folder_ / "good", "{}");  // the other process has ended
  EXPECT_FALSE(fs::exists(partial));
}

TEST_F(Checkpoints, ASaveWorksInNoFolderOfAnotherUser) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  const auto engine = make(Placement::nvme, "auto");
  toy_load(*engine);
  const fs::path partial = folder_ / "good.partial";
  fs::create_directory(partial);
  ASSERT_EQ(::chown(partial.c_str(), 12345, 12345), 0);
  try {
    engine->save(folder_ / "good", "{}");
    FAIL() << "it worked in another user's folder";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("belongs to user 12345"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(fs::exists(partial));
}

TEST_F(Checkpoints, ASaveRemovesWhatAKilledOneLeft) {
  auto engine = make(Placement::half, "auto");
  toy_load(*engine);
  const fs::path partial = folder_ / "good.partial";
  for (const char* name :
       {"manifest.json", "manifest.json.tmp", "index.bin", "index.bin.tmp", "rank2-index.bin", "resident.bin",
        "slab-job.1-0-1.bin", "extents-memory-0.bin", "shared-a-2.txt", "rank0-resident.bin",
        "rank12-slab-a-0.bin", "rank1/resident.bin", "rank1/shared-b.txt"})
    make_file(partial / name);
  engine->save(folder_ / "good", "{}");
  EXPECT_FALSE(fs::exists(partial));
  EXPECT_NO_THROW(engine->load(folder_ / "good"));
  EXPECT_FALSE(fs::exists(folder_ / "good" / "extents-memory-0.bin"));
}

// ---- a store that fails

/// The toy model with everything in a store that fails as told.
std::unique_ptr<Engine> faulty_engine(const io::Faults& faults) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {fs::temp_directory_path()};
  config.placement = Placement::nvme;
  config.chunk_elements = 4096;
  engine::Resources resources = make_resources(toy_units(), config, {"host", "memory", 1});
  resources.store = io::make_memory_store(64 << 20, faults, 65536);
  return std::make_unique<Engine>(toy_units(), config, std::move(resources));
}

TEST(Failure, PoisonsTheEngineAndSaysWhy) {
  for (const bool reads : {true, false}) {
    io::Faults faults;
    faults.seed = 5;
    (reads ? faults.read_error : faults.write_error) = 0.02;
    const auto owned = faulty_engine(faults);
    Engine& engine = *owned;
    std::string message;
    try {
      toy_load(engine);
      for (int step = 0; step < 200; ++step) toy_step(engine, step, 1, 0);
    } catch (const engine::EngineFailed& error) {
      message = error.what();
    }
    EXPECT_NE(message.find("Input/output error"), std::string::npos) << message;
    EXPECT_NE(message.find("checkpoint"), std::string::npos) << message;
    EXPECT_THROW(engine.acquire(0), engine::EngineFailed);
    EXPECT_THROW(engine.synchronize(), engine::EngineFailed);
    EXPECT_THROW(engine.save(fs::temp_directory_path() / "overspill-never", "{}"), engine::EngineFailed);
  }
}

TEST(Failure, AFlippedBitIsAnErrorNotANumber) {
  io::Faults faults;
  faults.seed = 9;
  faults.bit_flip_at_rest = 0.01;
  const auto owned = faulty_engine(faults);
  Engine& engine = *owned;
  EXPECT_ANY_THROW({
    toy_load(engine);
    for (int step = 0; step < 200; ++step) toy_step(engine, step, 1, 0);
  });
}

TEST(Step, SkipsAndCountsWhatIsNotFinite) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  Engine engine(toy_units(), config, make_resources(toy_units(), config, {}));
  toy_load(engine);
  toy_step(engine, 0, 1, 0);
  const std::vector<float> before = toy_contents(engine);
  std::vector<float> bad(5000, 1.0F);
  bad[4321] = std::numeric_limits<float>::infinity();
  engine.begin_pass({true, true});
  engine.add_gradient(5, 0, std::as_bytes(std::span(bad)), "F32");
  const optim::Hyper groups[2];
  const engine::StepResult result = engine.step(groups);
  EXPECT_TRUE(result.skipped);
  EXPECT_TRUE(std::isinf(result.norm)) << "a norm that looks healthy hides the reason";
  EXPECT_EQ(result.step, 1);
  EXPECT_EQ(engine.stats().skipped_steps, 1);
  EXPECT_EQ(toy_contents(engine), before);
  EXPECT_FALSE(engine.has_gradient(5, 0));
}

}  // namespace
}  // namespace overspill::testing
