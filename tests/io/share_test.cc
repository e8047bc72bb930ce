// When a checkpoint's folder stops sharing slabs with the store: deleted, moved, copied by hard links, taken
// apart file by file.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "io/checksum.h"
#include "tests/io/loop_disk.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

namespace fs = std::filesystem;

class Share : public ::testing::Test {
 protected:
  void SetUp() override {
    store_ = make_file_store(file_options(folder_.path()));
    store_->reserve(int64_t{16} << 20);
    AlignedMemory memory(int64_t{1} << 20);
    memory.fill(1);
    extent_ = store_->allocate(int64_t{1} << 20);
    ASSERT_FALSE(write(*store_, extent_, memory));
    store_->pin(extent_);
  }

  uint64_t saved(const std::string& name) {
    fs::create_directory(at(name));
    const Export exported = store_->export_extents(std::span(&extent_, 1), at(name));
    EXPECT_TRUE(exported.extents[0].linked);
    EXPECT_TRUE(exported.share);
    return exported.share.value_or(0);
  }

  fs::path at(const std::string& name) const { return folder_.path() / name; }

  /// A program as people call it, in the folder.
  void shell(const std::string& command) const {
    const std::string whole = fmt::format("cd '{}' && {}", folder_.path().string(), command);
    ASSERT_EQ(::system(whole.c_str()), 0) << whole;
  }

  ScratchFolder folder_;
  std::unique_ptr<Store> store_;
  Extent extent_;
};

TEST_F(Share, LivesAsLongAsTheFolderWhereverItIsMoved) {
  const uint64_t share = saved("one");
  EXPECT_TRUE(store_->share_lives(share));
  shell("mv one elsewhere");
  EXPECT_TRUE(store_->share_lives(share));
  shell("rm -r elsewhere");
  EXPECT_FALSE(store_->share_lives(share));
}

TEST_F(Share, NoFileOfTheFolderIsHeldOpen) {
  saved("one");
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry.path(), gone).string();
    EXPECT_FALSE(target.starts_with(at("one").string())) << target;
  }
}

TEST_F(Share, OfEachFolderEndsAlone) {
  const uint64_t one = saved("one"), two = saved("two"), three = saved("three");
  shell("mv one a && mv two b && mv three c && rm -r b");
  EXPECT_TRUE(store_->share_lives(one));
  EXPECT_FALSE(store_->share_lives(two));
  EXPECT_TRUE(store_->share_lives(three));
  store_->end_share(two);
  shell("rm -r a");
  EXPECT_FALSE(store_->share_lives(one));
  EXPECT_TRUE(store_->share_lives(three));
}

TEST_F(Share, IsKeptByACopyOfHardLinks) {
  const uint64_t one = saved("one"), two = saved("two");
  shell("cp -al one keepsake && rm -r one");
  EXPECT_TRUE(store_->share_lives(one));
  shell("rm -r two");
  EXPECT_FALSE(store_->share_lives(two)) << "the other one's copy is not its matter";
  shell("rm -r keepsake");
  EXPECT_FALSE(store_->share_lives(one));
}

TEST_F(Share, IsNotKeptByACopyOfBytes) {
  const uint64_t one = saved("one");
  shell("cp -r one copy && rm -r one");
  EXPECT_FALSE(store_->share_lives(one));
}

TEST_F(Share, LivesUntilTheLastFileOfAFolderThatIsMovedFileByFile) {
  const uint64_t one = saved("one"), two = saved("two");
  // What `rsync --remove-source-files` to another disk does; the names decide the order.
  shell("rm one/shared-test.txt");
  EXPECT_TRUE(store_->share_lives(one)) << "its slabs are still being copied";
  shell("rm one/slab-test-0.bin");
  EXPECT_FALSE(store_->share_lives(one));
  EXPECT_TRUE(store_->share_lives(two));
}

TEST_F(Share, LivesWhileAnotherFolderIsTakenApartInAnotherOrder) {
  const uint64_t one = saved("one"), two = saved("two");
  shell("rm two/slab-test-0.bin && rm one/shared-test.txt");
  EXPECT_TRUE(store_->share_lives(one)) << "its slab is there; the other folder has a mark and no slab";
  shell("rm one/slab-test-0.bin");
  EXPECT_FALSE(store_->share_lives(one));
  shell("rm two/shared-test.txt");
  EXPECT_FALSE(store_->share_lives(two));
}

TEST_F(Share, LivesWhileItsSlabHasItsNameWhateverIsLeftOfAFolderThatWasMoved) {
  const uint64_t one = saved("one"), two = saved("two");
  // The mark of `one` still stands for a name of the slab, which is another one than it had.
  shell("mv one elsewhere && rm elsewhere/slab-test-0.bin && rm two/shared-test.txt");
  EXPECT_TRUE(store_->share_lives(two)) << "two/slab-test-0.bin is there";
  shell("rm two/slab-test-0.bin");
  EXPECT_FALSE(store_->share_lives(two));
  shell("rm -r elsewhere");
  EXPECT_FALSE(store_->share_lives(one));
}

TEST_F(Share, NoTwoMarksAreCopiesOfOneFile) {
  saved("one"), saved("two");
  shell("! cmp -s one/shared-test.txt two/shared-test.txt");
}

TEST_F(Share, AFileThatHasTheSlabsNameIsNotLinked) {
  fs::rename(at("overspill-test") / "slab-0.bin", at("slab"));
  std::ofstream(at("overspill-test") / "slab-0.bin") << std::string(16 << 20, 'x');
  fs::create_directory(at("one"));
  const Export exported = store_->export_extents(std::span(&extent_, 1), at("one"));
  EXPECT_FALSE(exported.extents[0].linked);
  EXPECT_FALSE(fs::exists(at("one") / "slab-test-0.bin"));
  std::ifstream copy(at("one") / exported.extents[0].file);
  std::string found(static_cast<size_t>(extent_.bytes), 0);
  copy.seekg(exported.extents[0].offset).read(found.data(), std::ssize(found));
  AlignedMemory wanted(extent_.bytes);
  ASSERT_FALSE(read(*store_, extent_, wanted));
  EXPECT_EQ(std::memcmp(found.data(), wanted.data(), found.size()), 0);
}

TEST_F(Share, LivesWhereTheStoresOwnNamesWereRemoved) {
  const uint64_t one = saved("one");
  shell("rm overspill-test/slab-0.bin overspill-test/slab-mark-1");
  EXPECT_TRUE(store_->share_lives(one));
  shell("rm -r one");
  EXPECT_FALSE(store_->share_lives(one));
}

TEST_F(Share, OfACopyThereIsNone) {
  const fs::path memory = "/dev/shm";
  if (!fs::is_directory(memory)) GTEST_SKIP() << "no " << memory << " to copy to";
  const ScratchFolder elsewhere(memory);
  const Export exported = store_->export_extents(std::span(&extent_, 1), elsewhere.path());
  EXPECT_FALSE(exported.extents[0].linked);
  EXPECT_FALSE(exported.share);
  EXPECT_FALSE(fs::exists(at("overspill-test") / "slab-mark-1"));
}

TEST_F(Share, ACopyThatHasNoRoomIsRefusedBeforeItIsMade) {
  std::unique_ptr<LoopDisk> disk;
  try {
    disk = std::make_unique<LoopDisk>(folder_.path(), "small", int64_t{4} << 20);
  } catch (const NoLoopDisk& why) {
    GTEST_SKIP() << why.what();
  }
  AlignedMemory memory(int64_t{5} << 20);
  const Extent large = store_->allocate(int64_t{5} << 20);
  ASSERT_FALSE(write(*store_, large, memory));
  const fs::path target = disk->path() / "checkpoint";
  fs::create_directory(target);
  const Error error = error_of([&] { store_->export_extents(std::span(&large, 1), target); });
  EXPECT_EQ(error.kind, ErrorKind::no_space);
  EXPECT_EQ(error.operation, Operation::reserve) << "not in the middle of the copy";
  EXPECT_TRUE(contains(error.message(), "5242880 bytes")) << error.message();
  EXPECT_TRUE(contains(error.message(), "available")) << error.message();
  EXPECT_TRUE(fs::is_empty(target));
}

TEST_F(Share, AnExportThatFailsLeavesNone) {
  fs::create_directory(at("one"));
  AlignedMemory memory(int64_t{1} << 20);
  const Extent unwritten = store_->allocate(int64_t{1} << 20);
  const Extent extents[] = {extent_, unwritten};
  EXPECT_EQ(error_of([&] { store_->export_extents(extents, at("one")); }).kind, ErrorKind::corrupt);
  EXPECT_TRUE(fs::is_empty(at("one")));
  EXPECT_FALSE(fs::exists(at("overspill-test") / "slab-mark-1"));
}

}  // namespace
}  // namespace overspill::io
