// Files beside a manifest that are not what it says: other files, shorter ones, other bytes.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "tests/engine/checkpoint_builder.h"
#include "tests/engine/manifest_test.h"

namespace overspill::engine {
namespace {

using testing::ManifestTest;
using testing::read_file;
using testing::TemporaryFolder;
using testing::write_file;

TEST_F(ManifestTest, RefusesFilesThatAreNotItsOwn) {
  TemporaryFolder elsewhere;
  const auto data = path() / "data-0.slab";
  std::filesystem::rename(data, elsewhere.path() / "data");
  std::filesystem::create_symlink(elsewhere.path() / "data", data);
  expect_refused(text_, "symbolic link");
  EXPECT_THROW(read_range(path(), manifest_.units[0].pieces[0].range, {}), CheckpointError);
  std::filesystem::remove(data);
  std::filesystem::create_directory(data);
  expect_refused(text_, "regular file");
  std::filesystem::remove(data);
  ASSERT_EQ(::mkfifo(data.c_str(), 0600), 0);
  expect_refused(text_, "regular file");  // and does not hang
  std::filesystem::remove(data);
  expect_refused(text_, "data-0.slab");
  std::filesystem::rename(elsewhere.path() / "data", data);
  write_file(path() / kManifestFile, text_);
  (void)read_manifest(path());

  std::filesystem::rename(path() / kManifestFile, elsewhere.path() / "m");
  EXPECT_THROW((void)read_manifest(path()), CheckpointError);
  std::filesystem::create_symlink(elsewhere.path() / "m", path() / kManifestFile);
  EXPECT_THROW((void)read_manifest(path()), CheckpointError);
  std::filesystem::remove(path() / kManifestFile);
}

TEST_F(ManifestTest, RefusesTruncatedData) {
  for (const char* name : {"data-0.slab", "data-1.slab"}) {
    const auto file = path() / name;
    const auto bytes = std::filesystem::file_size(file);
    std::filesystem::resize_file(file, bytes - 1);
    expect_refused(text_, name);
    std::filesystem::resize_file(file, bytes);
  }
  // Truncated after the manifest was checked.
  for (const ManifestPiece& piece : manifest_.units[0].pieces)
    std::filesystem::resize_file(path() / piece.range.file, 10);
  std::vector<std::byte> to(manifest_.units[0].pieces[0].range.bytes);
  EXPECT_THROW(read_range(path(), manifest_.units[0].pieces[0].range, to), CheckpointError);
}

TEST_F(ManifestTest, FindsEveryFlippedBit) {
  FileRange range;
  for (const ManifestPiece& piece : manifest_.units[0].pieces) {
    if (piece.component == "lo") range = piece.range;
  }
  const auto file = path() / range.file;
  const std::string good = read_file(file);
  std::mt19937 random(1);
  std::vector<std::byte> to(range.bytes);
  for (int round = 0; round < 50; ++round) {
    const int64_t at = random() % range.bytes;
    std::string bad = good;
    bad[range.offset + at] ^= static_cast<char>(1 << random() % 8);
    write_file(file, bad);
    try {
      read_range(path(), range, to);
      ADD_FAILURE() << "byte " << at;
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find(range.file), std::string::npos);
      EXPECT_NE(std::string(error.what()).find(std::to_string(range.offset + at / 65536 * 65536)),
                std::string::npos);
    }
  }
  write_file(file, good);
  read_range(path(), range, to);
}

TEST_F(ManifestTest, VerifyReadsEveryByte) {
  int64_t done = 0;
  const VerifyResult whole = verify_checkpoint(
      path(), [](void* context, int64_t now, int64_t) { *static_cast<int64_t*>(context) = now; }, &done);
  EXPECT_EQ(whole.step, 12);
  EXPECT_EQ(whole.parameters, 5);
  EXPECT_EQ(whole.files, 2);
  EXPECT_EQ(whole.bytes, done);
  for (const ManifestUnit& unit : manifest_.units) {
    for (const ManifestPiece& piece : unit.pieces) {
      const std::filesystem::path file = path() / piece.range.file;
      const std::string content = read_file(file);
      for (const int64_t at : {int64_t{0}, piece.range.bytes / 2, piece.range.bytes - 1}) {
        std::string flipped = content;
        flipped[piece.range.offset + at] ^= 0x10;
        write_file(file, flipped);
        EXPECT_THROW(verify_checkpoint(path(), nullptr, nullptr), CheckpointError) << at;
      }
      write_file(file, content);
    }
  }
  EXPECT_EQ(verify_checkpoint(path(), nullptr, nullptr).bytes, whole.bytes);
}

}  // namespace
}  // namespace overspill::engine
