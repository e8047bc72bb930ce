// The power fails after any single file call of a save, or of the updates around it: the checkpoint before is
// whole, the new one is whole or has no name. docs/store.md, "Saving a checkpoint, in order", is what this
// enforces.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <barrier>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/resources.h"
#include "tests/engine/cut_disk.h"
#include "tests/engine/rank_world.h"
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
                    fmt::format("test-of-overspill-cut-{}-{}", name, ::getpid());
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

struct Case {
  const char* name;
  Placement placement;
  const char* store;
  int world = 1;
  bool links = true;  // the file system has hard links
  size_t stride = 1;  // of the calls that are lost or torn alone, every so many
};

/// What a cut may do to a checkpoint depends on how many calls were made before it.
struct Saved {
  std::string name;
  std::vector<float> contents;
  size_t after = 0;                  // so many calls it is there
  size_t deleted = size_t{1} << 60;  // from then on it is taken apart
};

class Cut : public ::testing::TestWithParam<Case> {
 protected:
  void TearDown() override {
    reader_.reset();
    fs::remove_all(root_);
    fs::remove_all(target_);
  }

  /// Trains, saves twice, deletes the first, saves again, trains; every call is in the log.
  void record() {
    const WatchedFiles watched(disk_);
    if (!GetParam().links) disk_.refuse_links();
    ASSERT_EQ(::mkdir((root_ / "nvme").c_str(), 0700), 0);
    const int world = GetParam().world;
    std::barrier all(world);
    const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      if (world == 1) ranks.reset();
      const Config config = config_of(rank);
      engine::ResourceOptions kinds{"host", GetParam().store, static_cast<uint64_t>(rank + 1)};
      Engine engine(small_units(), config,
                    ranks == nullptr ? make_resources(small_units(), config, kinds)
                                     : make_resources(small_units(), config, kinds, std::move(ranks)));
      toy_load(engine);
      const auto together = [&](const std::function<void()>& once) {
        all.arrive_and_wait();
        if (rank == 0) once();
        all.arrive_and_wait();
      };
      int step = 0;
      const auto train = [&](int steps) {
        for (int i = 0; i < steps; ++i) toy_step(engine, step++, 1, rank);
        engine.synchronize();
      };
      const auto save = [&](const char* name) {
        engine.save(root_ / name, "{}");
        together([&] { saved_.push_back({.name = name, .contents = {}, .after = disk_.calls()}); });
        together([&] { expect_names_of_a_save(root_ / name); });
        std::vector<float> contents = toy_contents(engine);
        together([&] { saved_.back().contents = std::move(contents); });
      };
      train(1);
      save("elsewhere/one");  // no other save makes this folder's entries durable
      train(2);
      together([&] { before_two_ = disk_.calls(); });
      save("two");
      train(1);
      together([&] {
        saved_[0].deleted = disk_.calls();
        remove_folder(root_ / saved_[0].name);
      });
      save("three");
      train(2);
      together([&] {
        end_ = disk_.calls();
        expect_all_was_seen();
      });
    });
    for (const std::string& error : errors) ASSERT_EQ(error, "");
    ASSERT_EQ(saved_.size(), 3U);
    EXPECT_NE(saved_[0].contents, saved_[1].contents);
    EXPECT_NE(saved_[1].contents, saved_[2].contents);
    after_two_ = saved_[1].after;
  }

  Config config_of(int rank) const {
    Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = {root_ / "nvme"};
    config.job = rank == 0 ? "cut" : fmt::format("cut-{}", rank);
    config.threads = 1;
    config.chunk_elements = 2048;
    config.placement = GetParam().placement;
    config.checkpoints_kept = 2;
    return config;
  }

  /// As `rm -r` does; calls from inside the C++ library would not be seen.
  static void remove_folder(const fs::path& folder) {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
    for (const fs::path& file : files) ASSERT_EQ(::unlink(file.c_str()), 0) << file;
    ASSERT_EQ(::unlinkat(AT_FDCWD, folder.c_str(), AT_REMOVEDIR), 0) << folder;
  }

  /// Else the next save would not remove what a killed one leaves.
  static void expect_names_of_a_save(const fs::path& folder) {
    for (const auto& entry : fs::directory_iterator(folder))
      EXPECT_TRUE(engine::is_file_of_a_save(entry.path().filename().string())) << entry.path();
  }

  /// What the log leaves where nothing is lost is what lies there: no call went past it.
  void expect_all_was_seen() {
    fs::remove_all(target_);
    disk_.leave(disk_.calls(), {}, {}, {}, target_);
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
  std::string wrong(const Disk& disk, size_t calls, const std::set<size_t>& lost,
                    const std::set<size_t>& torn = {}) {
    ++cuts_;
    fs::remove_all(target_);
    disk.leave(calls, lost, torn, {"elsewhere", "two", "two.partial", "three", "three.partial"}, target_);
    for (const Saved& saved : saved_) {
      const bool deleting = calls > saved.deleted;
      if (!fs::exists(target_ / saved.name)) {
        if (calls >= saved.after && !deleting) return saved.name + " was taken and is gone";
        continue;
      }
      std::string what = opens(saved);
      // Of a folder that is being deleted files may be missing. What is there is as it was.
      const bool missing =
          what.find("corrupt") == std::string::npos && what.find("numbers") == std::string::npos;
      if (!what.empty() && !(deleting && missing)) return what;
    }
    return "";
  }

  std::string opens(const Saved& saved) {
    try {
      reader().load(target_ / saved.name);
    } catch (const engine::CheckpointError& error) {
      return fmt::format("{} does not open: {}", saved.name, error.what());
    }
    const std::vector<float> found = toy_contents(reader());
    const bool same =
        std::memcmp(found.data(), saved.contents.data(), saved.contents.size() * sizeof(float)) == 0;
    return same ? "" : fmt::format("{} opens with other numbers", saved.name);
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
  std::vector<Saved> saved_;
  size_t before_two_ = 0, after_two_ = 0, end_ = 0;
  int64_t cuts_ = 0;
  std::unique_ptr<Engine> reader_;
};

TEST_P(Cut, LeavesTheOldCheckpointWholeAndTheNewOneWholeOrAbsent) {
  record();
  if (HasFatalFailure()) return;
  std::mt19937_64 random(1);
  for (size_t calls = saved_[0].after; calls <= end_; ++calls) {
    const std::vector<size_t> unsynced = disk_.unsynced(calls);
    const auto check = [&](const std::set<size_t>& lost, const std::set<size_t>& torn,
                           const std::string& what) {
      const std::string found = wrong(disk_, calls, lost, torn);
      ASSERT_EQ(found, "") << "cut after " << disk_.text(calls - 1) << ", " << what;
    };
    check({}, {}, "nothing lost");
    check(all_of(unsynced), {}, "all that was not synced is lost");
    for (size_t i = calls % GetParam().stride; i < unsynced.size(); i += GetParam().stride) {
      const size_t one = unsynced[i];
      std::set<size_t> others = all_of(unsynced);
      others.erase(one);
      check({one}, {}, "lost: " + disk_.text(one));
      check(others, {}, "of what was not synced only this is left: " + disk_.text(one));
      if (disk_.is_write(one)) check({}, {one}, "torn: " + disk_.text(one));
    }
    for (int i = 0; i < 4; ++i) {
      std::set<size_t> some, torn;
      for (const size_t call : unsynced) {
        if (random() % 2 == 0) some.insert(call);
        if (random() % 2 == 0 && disk_.is_write(call)) torn.insert(call);
      }
      check(some, torn, "some of what was not synced are lost, some writes are torn");
    }
    if (HasFatalFailure()) return;
  }
  fmt::print("{}: {} cut points ({} in the save), {} disks opened\n", GetParam().name,
             end_ - saved_[0].after + 1, after_two_ - before_two_, cuts_);
}

/// Space of a deleted checkpoint is used again only when the deletion is on the disk.
TEST_P(Cut, ShowsASyncOfTheDeletionThatIsLeftOut) {
  record();
  if (HasFatalFailure()) return;
  const bool linked = std::string_view(GetParam().store) != "memory" && GetParam().links;
  Disk less = disk_;
  size_t syncs = 0;
  for (size_t call = less.calls(); call-- > saved_[0].deleted;) {
    if (!less.is_sync_of_all(call)) continue;
    less.forget(call);
    ++syncs;
  }
  EXPECT_EQ(syncs, linked ? GetParam().world : 0);
  if (!linked) return;
  std::string shown;
  for (size_t calls = saved_[0].deleted; calls < less.calls() && shown.empty(); ++calls) {
    std::set<size_t> removals;  // by which the deletion is undone
    for (const size_t call : less.unsynced(calls)) {
      if (call >= saved_[0].deleted && less.text(call).starts_with("remove elsewhere/one"))
        removals.insert(call);
    }
    shown = wrong(less, calls, removals);
  }
  EXPECT_NE(shown.find("elsewhere/one does not open"), std::string::npos) << shown;
  EXPECT_NE(shown.find("corrupt"), std::string::npos) << shown;
}

INSTANTIATE_TEST_SUITE_P(
    Stores, Cut,
    ::testing::Values(
        Case{.name = "linked", .placement = Placement::nvme, .store = "threads", .stride = 5},
        Case{.name = "linked_and_resident", .placement = Placement::half, .store = "threads", .stride = 5},
        Case{.name = "copied", .placement = Placement::half, .store = "memory"},
        Case{.name = "resident", .placement = Placement::host, .store = "memory"},
        Case{.name = "copied_from_slabs",
             .placement = Placement::nvme,
             .store = "threads",
             .links = false,
             .stride = 5},
        Case{
            .name = "two_ranks", .placement = Placement::half, .store = "threads", .world = 2, .stride = 11}),
    [](const auto& param) { return std::string(param.param.name); });

/// Of one rank the calls have one order.
class CutOfOne : public Cut {};

/// Each sync of a save, left out: a cut shows it, unless another one of the same folder comes later (a name
/// in a folder counts only once the manifest has its own).
TEST_P(CutOfOne, ShowsEverySyncThatIsLeftOut) {
  record();
  if (HasFatalFailure()) return;
  const size_t deleted = saved_[0].deleted;
  for (size_t sync = before_two_; sync < after_two_; ++sync) {
    if (!disk_.is_sync(sync)) continue;
    Disk less = disk_;
    less.forget(sync);
    const std::vector<Saved> whole = saved_;
    for (Saved& saved : saved_) saved.after -= saved.after > sync ? 1 : 0;
    saved_[0].deleted -= 1;
    std::string shown;
    for (size_t calls = before_two_; calls < deleted && shown.empty(); ++calls)
      shown = wrong(less, calls, all_of(less.unsynced(calls)));
    saved_ = whole;
    bool again = false;
    for (size_t later = sync + 1; later < after_two_; ++later) again |= disk_.text(later) == disk_.text(sync);
    // A slab is synced before it is linked, and where it turns out that it cannot be, it is copied.
    const bool needless = !GetParam().links && disk_.text(sync).find("/slab-") != std::string::npos;
    EXPECT_EQ(shown.empty(), again || needless) << "without " << disk_.text(sync) << ": " << shown;
  }
}

TEST_P(CutOfOne, SavesInTheOrderOfTheDocumentation) {
  record();
  if (HasFatalFailure()) return;
  std::vector<std::string> made;
  for (size_t call = before_two_; call < after_two_; ++call) {
    if (made.empty() || made.back() != disk_.text(call)) made.push_back(disk_.text(call));
  }
  std::vector<std::string> wanted = {"mkdir two.partial", "sync ."};  // 4
  const auto then = [&](std::initializer_list<const char*> calls) {
    wanted.insert(wanted.end(), calls.begin(), calls.end());
  };
  const std::string name = GetParam().name;
  if (name != "linked" && name != "copied_from_slabs")  // 5
    then({"open two.partial/resident.bin", "write two.partial/resident.bin"});
  if (name.starts_with("linked"))  // 6
    then({"sync nvme/overspill-cut/slab-0.bin", "open nvme/overspill-cut/slab-mark-2",
          "write nvme/overspill-cut/slab-mark-2", "link two.partial/shared-cut.txt",
          "link two.partial/slab-cut-0.bin", "sync two.partial"});
  if (name == "copied")
    then({"open two.partial/extents-memory-0.bin", "allocate two.partial/extents-memory-0.bin",
          "write two.partial/extents-memory-0.bin", "sync two.partial/extents-memory-0.bin",
          "sync two.partial"});
  if (name == "copied_from_slabs")
    then({"sync nvme/overspill-cut/slab-0.bin", "open nvme/overspill-cut/slab-mark-2",
          "write nvme/overspill-cut/slab-mark-2", "remove nvme/overspill-cut/slab-mark-2",
          "open two.partial/extents-cut-0.bin", "allocate two.partial/extents-cut-0.bin",
          "write two.partial/extents-cut-0.bin", "sync two.partial/extents-cut-0.bin", "sync two.partial"});
  if (name != "linked" && name != "copied_from_slabs") then({"sync two.partial/resident.bin"});
  then({"open two.partial/index.bin.tmp", "write two.partial/index.bin.tmp", "sync two.partial/index.bin.tmp",
        "rename two.partial/index.bin", "sync two.partial"});
  then({"open two.partial/manifest.json.tmp", "write two.partial/manifest.json.tmp",  // 7
        "sync two.partial/manifest.json.tmp", "rename two.partial/manifest.json", "sync two.partial"});
  then({"rename two", "sync ."});  // 8
  EXPECT_EQ(made, wanted);
}

INSTANTIATE_TEST_SUITE_P(
    Stores, CutOfOne,
    ::testing::Values(
        Case{.name = "linked", .placement = Placement::nvme, .store = "threads"},
        Case{.name = "linked_and_resident", .placement = Placement::half, .store = "threads"},
        Case{.name = "copied", .placement = Placement::half, .store = "memory"},
        Case{.name = "resident", .placement = Placement::host, .store = "memory"},
        Case{.name = "copied_from_slabs", .placement = Placement::nvme, .store = "threads", .links = false}),
    [](const auto& param) { return std::string(param.param.name); });

// ---- a save that fails at its end

/// The folder above a checkpoint cannot be synced once the checkpoint has its name.
class UnsyncableName final : public FileWatcher {
 public:
  explicit UnsyncableName(fs::path checkpoint) : checkpoint_(std::move(checkpoint)) {}
  int failure_of(const FileCall& call) override {
    return named_ && call.kind == FileCall::Kind::sync ? EIO : 0;
  }
  void done(const FileCall& call, std::span<const std::byte>) override {
    if (call.kind == FileCall::Kind::rename && call.other == checkpoint_) named_ = true;
    if (call.kind != FileCall::Kind::remove || !named_ || !left_.empty()) return;
    for (const auto& entry : fs::directory_iterator(checkpoint_))
      left_.insert(entry.path().filename().string());
  }
  /// When the first of its files was removed.
  const std::set<std::string>& left() const { return left_; }

 private:
  const fs::path checkpoint_;
  bool named_ = false;
  std::set<std::string> left_;
};

/// Some network and FUSE file systems have no fsync of folders.
class UnsyncableFolders final : public FileWatcher {
 public:
  explicit UnsyncableFolders(int os_error) : os_error_(os_error) {}
  int failure_of(const FileCall& call) override {
    struct stat found {};
    if (call.kind != FileCall::Kind::sync || ::fstat(call.fd, &found) != 0 || !S_ISDIR(found.st_mode))
      return 0;
    ++refused_;
    return os_error_;
  }
  int refused() const { return refused_; }

 private:
  const int os_error_;
  int refused_ = 0;
};

TEST(Folders, ThatCannotBeSyncedStopNoSave) {
  const fs::path root = empty_folder("folders");
  for (const char* store : {"threads", "memory"}) {
    for (const int os_error : {EINVAL, EOPNOTSUPP, EIO}) {
      Config config;
      config.host_budget_bytes = 64 << 20;
      config.nvme = {root};
      config.threads = 1;
      config.chunk_elements = 2048;
      config.placement = Placement::nvme;
      Engine engine(small_units(), config, make_resources(small_units(), config, {"host", store, 1}));
      toy_load(engine);
      UnsyncableFolders watcher(os_error);
      const WatchedFiles watched(watcher);
      const fs::path folder = root / fmt::format("{}-{}", store, os_error);
      if (os_error == EIO) {
        EXPECT_THROW(engine.save(folder, "{}"), std::runtime_error) << store;
      } else {
        EXPECT_NO_THROW(engine.save(folder, "{}")) << store << " " << os_error;
        EXPECT_GT(watcher.refused(), 3);
      }
    }
  }
  fs::remove_all(root);
}

TEST(FailedSave, TakesTheManifestAwayBeforeTheData) {
  const fs::path root = empty_folder("unsyncable");
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.threads = 1;
  config.chunk_elements = 2048;
  Engine engine(small_units(), config, make_resources(small_units(), config, {}));
  toy_load(engine);
  UnsyncableName watcher(root / "one");
  {
    const WatchedFiles watched(watcher);
    EXPECT_THROW(engine.save(root / "one", "{}"), std::runtime_error);
  }
  EXPECT_EQ(watcher.left(), (std::set<std::string>{"index.bin", "resident.bin"}));
  EXPECT_FALSE(fs::exists(root / "one"));
  EXPECT_FALSE(fs::exists(root / "one.partial"));
  engine.save(root / "one", "{}");
  fs::remove_all(root);
}

}  // namespace
}  // namespace overspill::testing
