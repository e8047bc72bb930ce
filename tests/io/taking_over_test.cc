// A store goes on in the slabs that an ended run left in its checkpoints: what they hold of them is never
// written to, what they do not hold is room again, and a slab that anybody else may have is left alone.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "io/checksum.h"
#include "io/lock_holder.h"
#include "io/unique_fd.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRoom = 8 * kMiB;
constexpr int64_t kSlab = 4 * kMiB;

/// What a folder has of slabs, with the checksums.
struct LeftFolder {
  fs::path folder;
  std::vector<ExportedExtent> extents;
  std::vector<uint64_t> seeds;  // of their contents

  KeptSlabs slabs() const {
    KeptSlabs kept{folder, "shared-test.txt", {}};
    for (const ExportedExtent& extent : extents)
      kept.ranges.push_back({extent.file, extent.offset, extent.bytes, extent.block_checksums});
    return kept;
  }
};

class TakingOver : public ::testing::Test {
 protected:
  std::unique_ptr<Store> open(const std::string& job = "test") {
    FileStoreOptions options = file_options(folder_.path());
    options.job = job;
    options.slab_bytes = kSlab;
    return make_file_store(options);
  }

  fs::path at(const std::string& name) const { return folder_.path() / name; }

  /// Some extents of a run, between others that it has released, in a checkpoint.
  LeftFolder saved(Store& store, const std::string& name, uint64_t seed) {
    LeftFolder left{at(name), {}, {}};
    fs::create_directory(left.folder);
    std::vector<Extent> extents, others;
    for (uint64_t i = 0; i < 4; ++i) {
      extents.push_back(written(store, kMiB / 4 + kBlockBytes, seed + i));
      others.push_back(written(store, kMiB / 4, 1000 + i));
      left.seeds.push_back(seed + i);
      store.pin(extents.back());
    }
    Export exported = store.export_extents(extents, left.folder);
    left.extents = std::move(exported.extents);
    for (size_t i = 0; i < extents.size(); ++i) {
      store.release(extents[i]);
      store.release(others[i]);
    }
    return left;
  }

  /// A run saves two checkpoints, and ends.
  std::vector<LeftFolder> two_left() {
    const auto store = open();
    store->reserve(kRoom);
    return {saved(*store, "one", 1), saved(*store, "two", 100)};
  }

  static std::vector<KeptSlabs> all_of(const std::vector<LeftFolder>& left) {
    std::vector<KeptSlabs> kept;
    for (const LeftFolder& folder : left) kept.push_back(folder.slabs());
    return kept;
  }

  /// Every byte that the folder names, from its file.
  static void expect_whole(const LeftFolder& left) {
    for (size_t i = 0; i < left.extents.size(); ++i) {
      const ExportedExtent& extent = left.extents[i];
      std::ifstream file(left.folder / extent.file, std::ios::binary);
      AlignedMemory found(extent.bytes), wanted(extent.bytes);
      file.seekg(extent.offset);
      file.read(reinterpret_cast<char*>(found.data()), extent.bytes);
      wanted.fill(left.seeds[i]);
      EXPECT_TRUE(file.good() && found == wanted) << left.folder << ", extent " << i;
    }
  }

  static void fill(Store& store, int64_t bytes) {
    for (int64_t done = 0; done < bytes; done += kMiB / 4) written(store, kMiB / 4, 7777 + done);
  }

  int64_t disk_bytes() const {
    std::map<ino_t, int64_t> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
      struct stat info {};
      if (::lstat(entry.path().c_str(), &info) == 0 && S_ISREG(info.st_mode))
        files[info.st_ino] = info.st_blocks * 512;
    }
    int64_t bytes = 0;
    for (const auto& [inode, taken] : files) bytes += taken;
    return bytes;
  }

  void shell(const std::string& command) const {
    const std::string whole = fmt::format("cd '{}' && {}", folder_.path().string(), command);
    ASSERT_EQ(::system(whole.c_str()), 0) << whole;
  }

  ScratchFolder folder_;
};

TEST_F(TakingOver, WritesIntoWhatNoCheckpointHolds) {
  const auto left = two_left();
  const int64_t before = disk_bytes();
  const auto store = open();
  const TakenOver taken = store->take_over(all_of(left));
  EXPECT_TRUE(taken.left.empty()) << taken.left.front();
  EXPECT_EQ(taken.slab_bytes, kSlab);
  store->reserve(taken.slab_bytes);
  EXPECT_LT(disk_bytes() - before, kMiB / 4) << "new room was taken";
  fill(*store, kSlab - store->stats().allocated_bytes - kMiB);
  for (const LeftFolder& folder : left) expect_whole(folder);
}

TEST_F(TakingOver, GivesBackWhatACheckpointHeldOnceItIsDeleted) {
  const auto left = two_left();
  const auto store = open();
  const TakenOver taken = store->take_over(all_of(left));
  ASSERT_EQ(taken.folders.size(), 2U);
  store->reserve(kRoom);
  EXPECT_TRUE(store->share_lives(*taken.folders[0].share));
  shell("rm -r one");
  EXPECT_FALSE(store->share_lives(*taken.folders[0].share));
  EXPECT_TRUE(store->share_lives(*taken.folders[1].share));
  const int64_t before = store->stats().allocated_bytes;
  for (const Extent& extent : taken.folders[0].extents) store->unpin(extent);
  store->end_share(*taken.folders[0].share);
  EXPECT_EQ(store->stats().allocated_bytes, before / 2);
  expect_whole(left[1]);
}

TEST_F(TakingOver, GivesAnExtentBackToWhoeverLoadsItWithoutACopy) {
  const auto left = two_left();
  const auto store = open();
  const TakenOver taken = store->take_over(all_of(left));
  store->reserve(kRoom);
  const ExportedExtent& wanted = left[0].extents[2];
  const fs::path file = left[0].folder / wanted.file;
  const auto extent = store->own_extent(file, wanted.offset, wanted.bytes, wanted.block_checksums);
  ASSERT_TRUE(extent);
  EXPECT_TRUE(store->reclaim(*extent));
  EXPECT_FALSE(store->reclaim(*extent)) << "it is owned";
  AlignedMemory found(wanted.bytes), expected(wanted.bytes);
  EXPECT_FALSE(read(*store, *extent, found));
  expected.fill(left[0].seeds[2]);
  EXPECT_TRUE(found == expected);
  // The owner's release leaves the checkpoint's pin.
  store->release(*extent);
  fill(*store, kRoom - store->stats().allocated_bytes - kMiB);
  expect_whole(left[0]);
  // Not another content, length or place.
  std::vector<uint64_t> others = wanted.block_checksums;
  others.back() ^= 1;
  EXPECT_FALSE(store->own_extent(file, wanted.offset, wanted.bytes, others));
  EXPECT_FALSE(store->own_extent(file, wanted.offset, wanted.bytes - kBlockBytes, wanted.block_checksums));
  EXPECT_FALSE(store->own_extent(file, wanted.offset + kBlockBytes, wanted.bytes, wanted.block_checksums));
  EXPECT_FALSE(store->own_extent(at("one") / "none", wanted.offset, wanted.bytes, wanted.block_checksums));
}

TEST_F(TakingOver, FindsDamageWhenItReads) {
  const auto left = two_left();
  const ExportedExtent& harmed = left[0].extents[0];
  {
    std::fstream file(left[0].folder / harmed.file, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(harmed.offset + 5);
    file.put('x');
  }
  const auto store = open();
  store->take_over(all_of(left));
  const auto extent =
      store->own_extent(left[0].folder / harmed.file, harmed.offset, harmed.bytes, harmed.block_checksums);
  ASSERT_TRUE(extent);
  AlignedMemory memory(harmed.bytes);
  const auto error = read(*store, *extent, memory);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::corrupt);
}

struct Foreign {
  const char* name;
  const char* shell;
  const char* says;
  bool harms = false;
};

class TakingOverRefuses : public TakingOver, public ::testing::WithParamInterface<Foreign> {};

TEST_P(TakingOverRefuses, ASlabThatOthersMayHave) {
  auto left = two_left();
  shell(GetParam().shell);
  const auto store = open();
  const TakenOver taken = store->take_over(all_of(left));
  EXPECT_EQ(taken.slab_bytes, 0);
  ASSERT_EQ(taken.left.size(), 1U);
  EXPECT_NE(taken.left[0].find(GetParam().says), std::string::npos) << taken.left[0];
  EXPECT_NE(taken.left[0].find("slab-test-0.bin"), std::string::npos) << taken.left[0];
  for (const TakenOver::Folder& folder : taken.folders) EXPECT_FALSE(folder.share);
  store->reserve(kRoom);
  fill(*store, kRoom - kMiB);
  if (!GetParam().harms) {
    for (const LeftFolder& folder : left) expect_whole(folder);
  }
  for (const auto& entry : fs::directory_iterator(at("overspill-test")))
    EXPECT_EQ(entry.path().filename().string().find("slab-mark"), std::string::npos) << entry.path();
}

INSTANTIATE_TEST_SUITE_P(
    Slabs, TakingOverRefuses,
    ::testing::Values(Foreign{"a_copy_by_links", "cp -al one keepsake", "3 names"},
                      Foreign{"an_unfinished_save",
                              "mkdir three.partial && ln one/slab-test-0.bin three.partial/", "3 names"},
                      Foreign{"another_mode", "chmod 0666 one/slab-test-0.bin", "this user's alone"},
                      Foreign{"another_owner", "chown 1234 one/slab-test-0.bin", "this user's alone"},
                      Foreign{"another_length", "truncate -s +100 one/slab-test-0.bin", "no slab's length"},
                      Foreign{"cut_short", "truncate -s 4096 one/slab-test-0.bin", "no extent", true},
                      Foreign{"no_mark", "rm two/shared-test.txt", "shared-test.txt"},
                      Foreign{"another_s_mark",
                              "rm two/shared-test.txt && ln -s /etc/passwd two/shared-test.txt",
                              "shared-test.txt"}),
    [](const auto& info) { return info.param.name; });

TEST_F(TakingOver, LeavesASlabOfWhichOneCheckpointIsNotNamed) {
  auto left = two_left();
  left.pop_back();
  const auto store = open();
  EXPECT_EQ(store->take_over(all_of(left)).left.size(), 1U);
}

TEST_F(TakingOver, LeavesASlabOfWhichCheckpointsDisagree) {
  auto left = two_left();
  LeftFolder& two = left[1];
  two.extents[0].offset = left[0].extents[1].offset;  // other bytes there, of the same length
  EXPECT_EQ(open()->take_over(all_of(left)).left.size(), 1U);
  two.extents[0].offset += kBlockBytes;  // or bytes that overlap
  EXPECT_EQ(open()->take_over(all_of(left)).left.size(), 1U);
  two.extents[0].offset = -kBlockBytes;
  EXPECT_EQ(open()->take_over(all_of(left)).left.size(), 1U);
}

/// Of several ranks that start together each removes what dead runs left.
TEST_F(TakingOver, WaitsForAnotherRunThatRemovesADeadOnesNames) {
  const auto left = two_left();
  const fs::path dead = at("overspill-dead");
  fs::create_directory(dead);
  fs::permissions(dead, fs::perms::owner_all);
  fs::create_hard_link(at("one") / "slab-test-0.bin", dead / "slab-0.bin");
  const UniqueFd lock(::open((dead / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
  ASSERT_EQ(::pwrite(lock.get(), kRemoving.data(), kRemoving.size(), 0), std::ssize(kRemoving));
  const std::jthread remover([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    fs::remove(dead / "slab-0.bin");
    fs::remove(dead / "lock");
    fs::remove(dead);
    ::flock(lock.get(), LOCK_UN);
  });
  const auto store = open();
  const TakenOver taken = store->take_over(all_of(left));
  EXPECT_TRUE(taken.left.empty()) << taken.left.front();
}

TEST_F(TakingOver, LeavesASlabThatALiveRunHas) {
  const auto left = two_left();
  const auto first = open("first");
  EXPECT_EQ(first->take_over(all_of(left)).slab_bytes, kSlab);
  const auto second = open("second");
  const TakenOver taken = second->take_over(all_of(left));
  EXPECT_EQ(taken.slab_bytes, 0);
  ASSERT_EQ(taken.left.size(), 1U);
}

TEST_F(TakingOver, ACopyByLinksHasOneShareWithItsOriginal) {
  std::vector<LeftFolder> left;
  {
    const auto store = open();
    store->reserve(kRoom);
    left.push_back(saved(*store, "one", 1));
  }
  shell("cp -al one two");
  left.push_back(left[0]);
  left[1].folder = at("two");
  const auto store = open();
  const TakenOver taken = store->take_over(all_of(left));
  ASSERT_TRUE(taken.left.empty()) << taken.left.front();
  store->reserve(kRoom);
  ASSERT_TRUE(taken.folders[0].share);
  EXPECT_FALSE(taken.folders[1].share);
  const LeftFolder next =
      saved(*store, "next", 500);  // another share's slab, which these two must not account for
  shell("rm -r one");
  EXPECT_TRUE(store->share_lives(*taken.folders[0].share));
  fill(*store, kRoom - store->stats().allocated_bytes - kMiB);
  expect_whole(left[1]);
  shell("rm -r two");
  EXPECT_FALSE(store->share_lives(*taken.folders[0].share));
  expect_whole(next);
}

/// Once each path counted as a name, so that a keepsake's name could pass for that of an alias.
TEST_F(TakingOver, AFolderThatIsNamedTwiceCountsOnce) {
  auto left = two_left();
  shell("ln -s one alias");
  left.push_back(left[0]);
  left[2].folder = at("alias");
  {
    const auto store = open();
    const TakenOver taken = store->take_over(all_of(left));
    EXPECT_TRUE(taken.left.empty()) << taken.left.front();
    EXPECT_FALSE(taken.folders[2].share);
  }
  shell("cp -al two keepsake && rm -r two");
  const LeftFolder keepsake{at("keepsake"), left[1].extents, left[1].seeds};
  left.erase(left.begin() + 1);
  const auto store = open();
  const TakenOver taken = store->take_over(all_of(left));
  EXPECT_EQ(taken.slab_bytes, 0);
  store->reserve(kRoom);
  fill(*store, kRoom - kMiB);
  expect_whole(keepsake);
}

TEST_F(TakingOver, OfASlabWithHolesTakesNoMoreThanThereIs) {
  auto left = two_left();
  shell("cp -r one copy && rm -r one two && truncate -s 1T copy/slab-test-0.bin");
  LeftFolder copy = left[0];
  copy.folder = at("copy");
  const int64_t before = disk_bytes();
  const auto store = open();
  const TakenOver taken = store->take_over(all_of({copy}));
  EXPECT_EQ(taken.slab_bytes, 0);
  EXPECT_LT(disk_bytes() - before, kMiB);
  ASSERT_EQ(taken.left.size(), 1U);
}

TEST_F(TakingOver, ACopyByBytesIsTakenAsWell) {
  const auto left = two_left();
  shell("cp -r --reflink=never one copy && rm -r one two");
  LeftFolder copy = left[0];
  copy.folder = at("copy");
  const auto store = open();
  const TakenOver taken = store->take_over(all_of({copy}));
  ASSERT_TRUE(taken.left.empty()) << taken.left.front();
  store->reserve(kRoom);
  fill(*store, kRoom - store->stats().allocated_bytes - kMiB);
  expect_whole(copy);
}

TEST_F(TakingOver, GoesOnOverManyRuns) {
  std::vector<LeftFolder> left = two_left();
  for (int run = 0; run < 4; ++run) {
    const auto store = open();
    const TakenOver taken = store->take_over(all_of(left));
    ASSERT_TRUE(taken.left.empty()) << taken.left.front();
    store->reserve(kRoom);
    const int64_t reserved = store->stats().reserved_bytes;
    EXPECT_LE(reserved, kRoom) << run;
    left.push_back(saved(*store, fmt::format("run{}", run), 1000 * (run + 2)));
    shell(fmt::format("rm -r '{}'", left.front().folder.string()));
    left.erase(left.begin());
    for (const LeftFolder& folder : left) expect_whole(folder);
  }
}

}  // namespace
}  // namespace overspill::io
