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
  EXPECT_NE(orphans(disk_.path())[0].find(part_.path.string() + " is empty"), std::string::npos);
  write("shared-1.bin", "weights");
  ASSERT_EQ(orphans(disk_.path()).size(), 1u);
  EXPECT_NE(orphans(disk_.path())[0].find(part_.path.string() + " was a part"), std::string::npos);
}

TEST_F(Part, WhoseIdACrashLeftEmptyIsRemoved) {
  write(kId, "");
  EXPECT_TRUE(removed());
}

TEST_F(Part, WhoseIdACrashLeftHalfWrittenIsRemoved) {
  write(kId, part_.id.substr(0, 7));
  EXPECT_TRUE(removed());
}

TEST_F(Part, WhoseIdAPowerCutLeftAsZerosIsRemoved) {
  write(kId, std::string(300, '\0'));
  EXPECT_TRUE(removed());
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
