// The power fails after any single file call of a save, or of the updates around it: the checkpoint before is
// whole, the new one is whole or has no name. docs/store.md, "Saving a checkpoint, in order", is what this
// enforces.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/resources.h"
#include "tests/engine/cut_fixture.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::Config;
using engine::Engine;
using engine::Placement;

/// Of a long log no call is lost alone; the draws lose some together.
constexpr size_t kNeverAlone = size_t{1} << 60;

CutCase in_background(const char* name, Placement placement, int world, bool links) {
  return {.name = name,
          .placement = placement,
          .store = "threads",
          .world = world,
          .links = links,
          .stride = world > 2 ? kNeverAlone : 401,
          .draws = 1,
          .paths = 2,
          .saves = CutCase::Saves::in_background};
}

TEST_P(Cut, LeavesTheOldCheckpointWholeAndTheNewOneWholeOrAbsent) {
  record();
  if (HasFatalFailure()) return;
  if (GetParam().saves == CutCase::Saves::in_background) {
    for (const SavedInCut& saved : saved_) EXPECT_GE(trained_during(saved), 3) << saved.name;
  }
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
    for (int i = 0; i < GetParam().draws; ++i) {
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
  EXPECT_EQ(syncs, linked ? GetParam().world + saved_[0].parts.size() : 0);
  // With several paths a part that is back is harmless while its checkpoint is not, and the next save makes
  // all removals on the part's disk durable before it writes there.
  if (!linked || GetParam().paths > 1) return;
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

const std::vector<CutCase> kBlocking = {
    CutCase{.name = "linked", .placement = Placement::nvme, .store = "threads", .stride = 9},
    CutCase{.name = "linked_and_resident", .placement = Placement::half, .store = "threads", .stride = 9},
    CutCase{.name = "copied", .placement = Placement::half, .store = "memory"},
    CutCase{.name = "resident", .placement = Placement::host, .store = "memory"},
    CutCase{.name = "copied_from_slabs",
            .placement = Placement::nvme,
            .store = "threads",
            .links = false,
            .stride = 9},
    CutCase{.name = "two_ranks", .placement = Placement::half, .store = "threads", .world = 2, .stride = 17},
    CutCase{.name = "linked_over_two_paths",
            .placement = Placement::half,
            .store = "threads",
            .stride = 401,
            .draws = 1,
            .paths = 2},
    CutCase{.name = "copied_over_two_paths",
            .placement = Placement::nvme,
            .store = "threads",
            .links = false,
            .stride = 401,
            .draws = 1,
            .paths = 2},
    CutCase{.name = "two_ranks_over_two_paths",
            .placement = Placement::nvme,
            .store = "threads",
            .world = 2,
            .stride = 401,
            .draws = 1,
            .paths = 2}};

INSTANTIATE_TEST_SUITE_P(Stores, Cut, ::testing::ValuesIn(kBlocking),
                         [](const auto& param) { return std::string(param.param.name); });

INSTANTIATE_TEST_SUITE_P(InTheBackground, Cut,
                         ::testing::Values(in_background("linked", Placement::half, 1, true),
                                           in_background("copied", Placement::half, 1, false),
                                           in_background("two_ranks_linked", Placement::half, 2, true),
                                           in_background("two_ranks_copied", Placement::half, 2, false),
                                           in_background("four_ranks_linked", Placement::nvme, 4, true),
                                           in_background("four_ranks_copied", Placement::nvme, 4, false)),
                         [](const auto& param) { return std::string(param.param.name); });

/// Of one rank the calls have one order.
const std::vector<CutCase> kOfOne = {
    CutCase{.name = "linked", .placement = Placement::nvme, .store = "threads"},
    CutCase{.name = "linked_and_resident", .placement = Placement::half, .store = "threads"},
    CutCase{.name = "copied", .placement = Placement::half, .store = "memory"},
    CutCase{.name = "resident", .placement = Placement::host, .store = "memory"},
    CutCase{.name = "copied_from_slabs", .placement = Placement::nvme, .store = "threads", .links = false}};

class CutOfOne : public Cut {};
class EverySync : public Cut {};

/// Each sync of a save, left out: a cut shows it, unless another one of the same folder comes later (a name
/// in a folder counts only once the manifest has its own).
TEST_P(EverySync, IsShownByACutWhereItIsLeftOut) {
  record();
  if (HasFatalFailure()) return;
  const size_t deleted = saved_[0].deleted;
  for (size_t sync = before_two_; sync < after_two_; ++sync) {
    if (!disk_.is_sync(sync)) continue;
    // A slab of another path is synced twice, before each try to link it: left out are both.
    const bool is_slab = disk_.text(sync).find("/slab-") != std::string::npos;
    const auto is_same = [&](size_t call) { return disk_.text(call) == disk_.text(sync); };
    Disk less = disk_;
    size_t left_out = 0;
    for (size_t call = after_two_; call-- > sync;) {
      if (call != sync && !(is_slab && is_same(call))) continue;
      less.forget(call);
      ++left_out;
    }
    const std::vector<SavedInCut> whole = saved_;
    for (SavedInCut& saved : saved_) saved.after -= saved.after > sync ? left_out : 0;
    saved_[0].deleted -= left_out;
    std::string shown;
    for (size_t calls = before_two_; calls < deleted && shown.empty(); ++calls)
      shown = wrong(less, calls, all_of(less.unsynced(calls)));
    saved_ = whole;
    bool again = false, before = false;
    for (size_t call = before_two_; call < after_two_; ++call)
      (call < sync ? before : again) |= call != sync && is_same(call);
    // The note in a part, which was written under another name, is written once more when the checkpoint has
    // its name, and says the same.
    const bool is_note = disk_.text(sync).ends_with("/overspill-part.txt");
    // A slab is synced before it is linked, and where it turns out that it cannot be, it is copied.
    const bool needless = is_slab ? before || !GetParam().links : is_note || again;
    EXPECT_EQ(shown.empty(), needless) << "without " << disk_.text(sync) << ": " << shown;
  }
}

INSTANTIATE_TEST_SUITE_P(Stores, EverySync, ::testing::ValuesIn(kOfOne),
                         [](const auto& param) { return std::string(param.param.name); });
INSTANTIATE_TEST_SUITE_P(TwoPaths, EverySync,
                         ::testing::Values(CutCase{
                             .name = "linked", .placement = Placement::half, .store = "threads", .paths = 2}),
                         [](const auto& param) { return std::string(param.param.name); });

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

INSTANTIATE_TEST_SUITE_P(Stores, CutOfOne, ::testing::ValuesIn(kOfOne),
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
  const fs::path root = cut_folder("folders");
  for (const char* store : {"threads", "memory"}) {
    for (const int os_error : {EINVAL, EOPNOTSUPP, EIO}) {
      Config config;
      config.host_budget_bytes = 64 << 20;
      config.nvme = {root};
      config.threads = 1;
      config.chunk_elements = 2048;
      config.placement = Placement::nvme;
      Engine engine(cut_units(), config, make_resources(cut_units(), config, {"host", store, 1}));
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
  const fs::path root = cut_folder("unsyncable");
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.threads = 1;
  config.chunk_elements = 2048;
  Engine engine(cut_units(), config, make_resources(cut_units(), config, {}));
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
