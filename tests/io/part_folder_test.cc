// What a crash can leave of a part of a checkpoint, and what is removed with the checkpoint.
#include "io/part_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "io/store.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

namespace fs = std::filesystem;

constexpr const char* kId = "overspill-part.txt";

bool is_slab(std::string_view name) {
  return name.starts_with("shared-");
}

class Part : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(checkpoint_);
    part_ = make_part(checkpoint_, disk_.path());
  }

  void write(const std::string& name, const std::string& text) const {
    std::ofstream(part_.path / name, std::ios::binary) << text;
  }
  /// Whether the part's folder is gone when the checkpoint's parts have been removed.
  bool removed() const {
    const bool told = !remove_parts(checkpoint_, &is_slab).empty();
    const bool there = fs::exists(part_.path);
    EXPECT_TRUE(there || !told);
    return !there;
  }

  ScratchFolder home_, disk_;
  const fs::path checkpoint_ = home_.path() / "checkpoint";
  PartFolder part_;
};

TEST_F(Part, IsRemovedWithItsFiles) {
  write("shared-1.bin", "weights");
  EXPECT_TRUE(removed());
}

TEST_F(Part, OfWhichACrashLeftTheEmptyFolderIsRemoved) {
  fs::remove(part_.path / kId);
  EXPECT_TRUE(removed());
}

TEST_F(Part, WithoutItsIdIsTold) {
  fs::remove(part_.path / kId);
  ASSERT_EQ(orphans(disk_.path()).size(), 1u);
  EXPECT_NE(orphans(disk_.path())[0].find(part_.path.string() + " has no data"), std::string::npos);
  write("shared-1.bin", "weights");
  ASSERT_EQ(orphans(disk_.path()).size(), 1u);
  EXPECT_NE(orphans(disk_.path())[0].find(part_.path.string() + " was a part"), std::string::npos);
}

TEST_F(Part, WhoseIdACrashLeftUnfinishedIsRemoved) {
  fs::rename(part_.path / kId, part_.path / (std::string(kId) + ".tmp"));
  EXPECT_TRUE(removed());
}

// No crash leaves these: who cannot read the id, as where no descriptor is left, must not take it away.
TEST_F(Part, WhoseIdIsNotReadableStays) {
  for (const std::string& text : {std::string(), part_.id.substr(0, 7), std::string(300, '\0')}) {
    write(kId, text);
    EXPECT_FALSE(removed());
    EXPECT_TRUE(fs::exists(part_.path / kId));
  }
}

TEST_F(Part, OfARankThatIsBeingSavedIsNoOrphan) {
  fs::remove_all(part_.path);
  const fs::path rank = home_.path() / "step-4.partial" / "rank1";
  fs::create_directories(rank);
  part_ = make_part(rank, disk_.path());
  EXPECT_TRUE(orphans(disk_.path()).empty());
  fs::remove_all(rank);
  EXPECT_EQ(orphans(disk_.path()).size(), 1u);
}

TEST_F(Part, WithoutItsIdAndWithAFileStays) {
  fs::remove(part_.path / kId);
  write("shared-1.bin", "whose weights?");
  EXPECT_FALSE(removed());
  EXPECT_TRUE(fs::exists(part_.path / "shared-1.bin"));
}

TEST_F(Part, WithAnotherIdStays) {
  write(kId, "0123456789abcdef\n/somewhere/else\n");
  EXPECT_FALSE(removed());
}

TEST_F(Part, WithAFileOfSomebodyElseStays) {
  write("notes.txt", "mine");
  EXPECT_FALSE(removed());
  EXPECT_TRUE(fs::exists(part_.path / "notes.txt"));
  EXPECT_TRUE(is_part(part_)) << "its id goes last";
}

// A checkpoint's files come from outside: they may name any folder as their part.
TEST_F(Part, ThatIsAnEmptyFolderOfSomebodyElseStays) {
  const fs::path other = disk_.path() / "empty";
  fs::create_directory(other);
  std::ofstream(checkpoint_ / ("part-" + part_.id + ".txt")) << other.string() << '\n';
  EXPECT_TRUE(remove_parts(checkpoint_, &is_slab).empty());
  EXPECT_TRUE(fs::exists(other));
}

}  // namespace
}  // namespace overspill::io
