// The power fails after any single file call of a save, or of the updates around it: the checkpoint before is
// whole, the new one is whole or has no name. docs/store.md, "Saving a checkpoint, in order", is what this
// enforces.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "engine/checkpoint/manifest.h"
#include "engine/resources.h"
#include "tests/engine/cut_disk.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::Config;
using engine::Engine;
using engine::Placement;
using optim::Format;

std::vector<engine::UnitSpec> small_units() {
  return {{"embed", Format::exact, "BF16", {{"embed.weight", {40, 64}, 0, {}}}},
          {"scale", Format::fp32, "F32", {{"scale.weight", {900}, 1, {}}}},
          {"frozen", engine::kFrozen, "F32", {{"frozen.weight", {300}, 0, {}}}}};
}

fs::path empty_folder(const std::string& name) {
  const fs::path memory = "/dev/shm";
  fs::path folder = (fs::is_directory(memory) ? memory : fs::temp_directory_path()) /
                    fmt::format("overspill-cut-{}-{}", name, ::getpid());
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

struct Case {
  const char* name;
  Placement placement;
  const char* store;
};

class Cut : public ::testing::TestWithParam<Case> {
 protected:
  void TearDown() override {
    reader_.reset();
    fs::remove_all(root_);
    fs::remove_all(target_);
  }

  /// Trains and saves; every call is in the log.
  void record() {
    const WatchedFiles watched(disk_);
    fs::create_directories(root_);
    ASSERT_EQ(::mkdir((root_ / "nvme").c_str(), 0700), 0);
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = {root_ / "nvme"};
    config.job = "cut";
    config.threads = 1;
    config.chunk_elements = 2048;
    config.placement = GetParam().placement;
    config.checkpoints_kept = 2;
    Engine engine(small_units(), config,
                  make_resources(small_units(), config, {"host", GetParam().store, 1}));
    toy_load(engine);
    int step = 0;
    const auto train = [&](int steps) {
      for (int i = 0; i < steps; ++i) toy_step(engine, step++, 1, 0);
      engine.synchronize();
    };
    train(1);
    engine.save(root_ / "one", "{}");
    at_one_ = toy_contents(engine);
    after_one_ = disk_.calls();
    train(2);
    before_two_ = disk_.calls();
    engine.save(root_ / "two", "{}");
    at_two_ = toy_contents(engine);
    after_two_ = disk_.calls();
    train(1);
    EXPECT_NE(at_one_, at_two_);
    end_ = disk_.calls();
    expect_all_was_seen();
  }

  /// What the log leaves where nothing is lost is what lies there: no call went past it.
  void expect_all_was_seen() {
    fs::remove_all(target_);
    disk_.leave(disk_.calls(), {}, false, {}, target_);
    for (const auto& entry : fs::recursive_directory_iterator(root_)) {
      const fs::path other = target_ / fs::relative(entry.path(), root_);
      ASSERT_TRUE(fs::exists(other)) << other;
      if (!entry.is_regular_file()) continue;
      EXPECT_TRUE(content(entry.path()) == content(other)) << other;
    }
    for (const auto& entry : fs::recursive_directory_iterator(target_)) {
      ASSERT_TRUE(fs::exists(root_ / fs::relative(entry.path(), target_))) << entry.path();
    }
  }

  static std::string content(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  /// Empty, or what is wrong with the disk that this cut leaves.
  std::string wrong(const Disk& disk, size_t calls, const std::set<size_t>& lost, bool torn,
                    bool two_is_taken) {
    ++cuts_;
    fs::remove_all(target_);
    disk.leave(calls, lost, torn, {"one", "two", "two.partial"}, target_);
    if (std::string what = opens("one", at_one_); !what.empty()) return what;
    if (!fs::exists(target_ / "two")) return two_is_taken ? "two was taken and is gone" : "";
    return opens("two", at_two_);
  }

  std::string opens(const char* name, const std::vector<float>& expected) {
    try {
      reader().load(target_ / name);
    } catch (const engine::CheckpointError& error) {
      return fmt::format("{} does not open: {}", name, error.what());
    }
    const std::vector<float> found = toy_contents(reader());
    const bool same = std::memcmp(found.data(), expected.data(), expected.size() * sizeof(float)) == 0;
    return same ? "" : fmt::format("{} opens with other numbers", name);
  }

  Engine& reader() {
    if (reader_ == nullptr) {
      Config config;
      config.host_budget_bytes = 64 << 20;
      config.threads = 1;
      config.chunk_elements = 2048;
      reader_ = std::make_unique<Engine>(small_units(), config, make_resources(small_units(), config, {}));
    }
    return *reader_;
  }

  static std::set<size_t> all_of(const std::vector<size_t>& calls) { return {calls.begin(), calls.end()}; }

  fs::path root_ = empty_folder("disk");
  fs::path target_ = empty_folder("left");
  Disk disk_{root_};
  std::vector<float> at_one_, at_two_;
  size_t after_one_ = 0, before_two_ = 0, after_two_ = 0, end_ = 0;
  int64_t cuts_ = 0;
  std::unique_ptr<Engine> reader_;
};

TEST_P(Cut, LeavesTheOldCheckpointWholeAndTheNewOneWholeOrAbsent) {
  record();
  std::mt19937_64 random(1);
  for (size_t calls = after_one_; calls <= end_; ++calls) {
    const std::vector<size_t> unsynced = disk_.unsynced(calls);
    const bool taken = calls >= after_two_;
    const auto check = [&](const std::set<size_t>& lost, bool torn, const std::string& what) {
      const std::string found = wrong(disk_, calls, lost, torn, taken);
      ASSERT_EQ(found, "") << "cut after " << disk_.text(calls - 1) << ", " << what;
    };
    check({}, false, "nothing lost");
    check(all_of(unsynced), false, "all that was not synced is lost");
    check({}, true, "the last write is torn");
    for (const size_t one : unsynced) check({one}, false, "lost: " + disk_.text(one));
    for (const size_t one : unsynced) {
      std::set<size_t> others = all_of(unsynced);
      others.erase(one);
      check(others, false, "of what was not synced only this is left: " + disk_.text(one));
    }
    for (int i = 0; i < 4; ++i) {
      std::set<size_t> some;
      for (const size_t call : unsynced) {
        if (random() % 2 == 0) some.insert(call);
      }
      check(some, false, "some of what was not synced are lost");
    }
    if (HasFatalFailure()) return;
  }
  fmt::print("{}: {} cut points ({} in the save), {} disks opened\n", GetParam().name, end_ - after_one_ + 1,
             after_two_ - before_two_, cuts_);
}

/// Each sync of a save, left out: a cut shows it, unless another one of the same folder comes later (a name
/// in a folder counts only once the manifest has its own).
TEST_P(Cut, ShowsEverySyncThatIsLeftOut) {
  record();
  for (size_t sync = before_two_; sync < after_two_; ++sync) {
    if (!disk_.is_sync(sync)) continue;
    Disk less = disk_;
    less.forget(sync);
    std::string shown;
    for (size_t calls = before_two_; calls < end_ && shown.empty(); ++calls) {
      shown = wrong(less, calls, all_of(less.unsynced(calls)), false, calls + 1 >= after_two_);
    }
    bool again = false;
    for (size_t later = sync + 1; later < after_two_; ++later) again |= disk_.text(later) == disk_.text(sync);
    EXPECT_EQ(shown.empty(), again) << "without " << disk_.text(sync) << ": " << shown;
  }
}

TEST_P(Cut, SavesInTheOrderOfTheDocumentation) {
  record();
  std::vector<std::string> made;
  for (size_t call = before_two_; call < after_two_; ++call) {
    if (made.empty() || made.back() != disk_.text(call)) made.push_back(disk_.text(call));
  }
  std::vector<std::string> wanted = {"mkdir two.partial", "sync ."};  // 4
  const auto then = [&](std::initializer_list<const char*> calls) {
    wanted.insert(wanted.end(), calls.begin(), calls.end());
  };
  const std::string name = GetParam().name;
  if (name.starts_with("linked"))  // 5
    then({"sync nvme/overspill-cut/slab-0.bin", "open nvme/overspill-cut/slab-mark-2",
          "write nvme/overspill-cut/slab-mark-2", "link two.partial/shared-cut.txt",
          "link two.partial/slab-cut-0.bin", "sync two.partial"});
  if (name == "copied")
    then({"open two.partial/extents-memory-0.bin", "allocate two.partial/extents-memory-0.bin",
          "write two.partial/extents-memory-0.bin", "sync two.partial/extents-memory-0.bin",
          "sync two.partial"});
  if (name != "linked")  // 6
    then(
        {"open two.partial/resident.bin", "write two.partial/resident.bin", "sync two.partial/resident.bin"});
  then({"open two.partial/manifest.json.tmp", "write two.partial/manifest.json.tmp",  // 7
        "sync two.partial/manifest.json.tmp", "rename two.partial/manifest.json", "sync two.partial"});
  then({"rename two", "sync ."});  // 8
  EXPECT_EQ(made, wanted);
}

INSTANTIATE_TEST_SUITE_P(Stores, Cut,
                         ::testing::Values(Case{"linked", Placement::nvme, "threads"},
                                           Case{"linked_and_resident", Placement::half, "threads"},
                                           Case{"copied", Placement::half, "memory"},
                                           Case{"resident", Placement::host, "memory"}),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace overspill::testing
