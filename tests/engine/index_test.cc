// The binary part of a manifest: what it holds, what is refused of it, and what a reader of one shard opens.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "engine/checkpoint/index_file.h"
#include "io/checksum.h"
#include "tests/engine/checkpoint_builder.h"
#include "tests/engine/manifest_test.h"

namespace overspill::engine {
namespace {

using testing::CheckpointBuilder;
using testing::Json;
using testing::ManifestTest;
using testing::read_file;
using testing::TemporaryFolder;
using testing::write_file;

class IndexTest : public ManifestTest {
 protected:
  void SetUp() override {
    ManifestTest::SetUp();
    write_file(path() / kManifestFile, newest_);
    index_ = read_file(path() / kIndexFile);
  }

  /// With an index of these bytes that the manifest believes in.
  std::string refusal(const std::string& index) {
    write_file(path() / kIndexFile, index);
    Json json = Json::parse(newest_);
    json["indexes"][0]["bytes"] = index.size();
    json["indexes"][0]["checksum"] = testing::hex(io::checksum_block(std::as_bytes(std::span(index))));
    write_file(path() / kManifestFile, testing::sealed(json.dump()));
    try {
      (void)read_manifest(path());
      return "accepted";
    } catch (const CheckpointError& error) {
      return error.what();
    }
  }

  std::string index_;
};

TEST_F(IndexTest, HasWhatTheTextOfVersion3Had) {
  const std::string now = testing::version_3(read_manifest(path()));
  EXPECT_EQ(now, text_);
  EXPECT_LT(newest_.size(), text_.size() / 2);
}

TEST_F(IndexTest, AnotherFileInItsPlaceIsRefused) {
  for (const size_t at : {size_t{0}, size_t{20}, index_.size() / 2, index_.size() - 1}) {
    std::string flipped = index_;
    flipped[at] ^= 4;
    write_file(path() / kIndexFile, flipped);
    EXPECT_THROW((void)read_manifest(path()), CheckpointError) << at;
  }
  write_file(path() / kIndexFile, index_ + "x");
  EXPECT_THROW((void)read_manifest(path()), CheckpointError);
  write_file(path() / kIndexFile, index_.substr(1));
  EXPECT_THROW((void)read_manifest(path()), CheckpointError);
  std::filesystem::remove(path() / kIndexFile);
  EXPECT_THROW((void)read_manifest(path()), CheckpointError);
  std::filesystem::create_symlink("data-0.slab", path() / kIndexFile);
  EXPECT_THROW((void)read_manifest(path()), CheckpointError);
}

TEST_F(IndexTest, CountsThatDoNotFitAreRefusedBeforeMemoryIsTaken) {
  for (size_t field = 8; field < 40; field += 8) {
    for (const uint64_t value :
         {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, uint64_t{1} << 60, ~uint64_t{0}}) {
      std::string wrong = index_;
      std::memcpy(wrong.data() + field, &value, sizeof value);
      if (wrong == index_) continue;
      EXPECT_NE(refusal(wrong).find(kIndexFile), std::string::npos) << field << ": " << refusal(wrong);
    }
  }
  EXPECT_NE(refusal("OVSPIDX2" + index_.substr(8)).find("does not begin"), std::string::npos);
  EXPECT_NE(refusal("OVSP").find("ends too early"), std::string::npos);
}

TEST_F(IndexTest, SurvivesAnyEdit) {
  int accepted = 0;
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    std::mt19937 random(seed);
    std::string wrong = index_;
    for (uint32_t edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % std::min<size_t>(wrong.size(), 900);  // of checksums any value is right
      if (random() % 3 == 0) {
        const int64_t number = static_cast<int64_t>(random() % 70'000) - 5;
        std::memcpy(wrong.data() + at / 8 * 8, &number, std::min(sizeof number, wrong.size() - at / 8 * 8));
      } else {
        wrong[at] = static_cast<char>(random());
      }
    }
    const std::string said = refusal(wrong);
    if (said == "accepted") {
      ++accepted;
    } else {
      ASSERT_NE(said.find(path().string()), std::string::npos) << "seed " << seed << ": " << said;
    }
  }
  EXPECT_LT(accepted, 3000);
}

TEST_F(IndexTest, TheTextThatNamesItIsChecked) {
  const auto refused = [&](const std::function<void(Json&)>& change, const std::string& part) {
    write_file(path() / kIndexFile, index_);
    expect_change_refused(newest_, change, part);
  };
  refused([](Json& json) { json["indexes"][0]["file"] = "../index.bin"; }, "cannot be a file of this folder");
  refused([](Json& json) { json["indexes"][0]["file"] = "manifest.json"; },
          "cannot be a file of this folder");
  refused([](Json& json) { json["indexes"][0]["bytes"] = int64_t{1} << 40; }, "1099511627776 bytes");
  refused([](Json& json) { json["indexes"][0]["bytes"] = 0; }, "0 bytes");
  refused([](Json& json) { json["indexes"][0]["checksum"] = "12"; }, "16 digits");
  refused([](Json& json) { json["indexes"][0]["shard"] = 1; }, "shard 1 of 1");
  refused([](Json& json) { json["indexes"][0]["shards"] = 2; }, "shard 0 of 2");
  refused([](Json& json) { json["indexes"].push_back(json["indexes"][0]); }, "two indexes are called");
  refused([](Json& json) { json["indexes"] = Json::array(); }, "the second alone");
  refused([](Json& json) { json["units"][0]["pieces"] = Json::array(); }, "the second alone");
  refused([](Json& json) { json["version"] = 3; }, "the first alone");
}

/// Three shards of one unit, each with a file and an index of its own.
class Shards : public ::testing::Test {
 protected:
  void SetUp() override {
    CheckpointBuilder builder(folder_.path());
    builder.manifest.units.reserve(1);
    ManifestUnit& unit = builder.add_unit("u", "fp32", "F32", 96);
    CheckpointBuilder::add_segment(unit, "u.w", {90}, 0);
    for (const char* component : {"p", "m", "v"})
      builder.add_component(unit, component, std::string(96 * 4, component[0]), 32);
    whole_ = builder.manifest;
    Manifest text = whole_;
    for (int64_t shard = 0; shard < 3; ++shard) {
      std::vector<ManifestUnit> own = whole_.units;
      std::erase_if(own[0].pieces, [&](const ManifestPiece& piece) { return piece.begin != 32 * shard; });
      const std::string file = "rank" + std::to_string(shard) + "-index.bin";
      text.indexes.push_back(write_index(folder_.path(), file, own, {shard, 3}));
    }
    write_manifest_text(folder_.path(), text);
  }

  TemporaryFolder folder_;
  Manifest whole_;
};

TEST_F(Shards, AreOneManifest) {
  const Manifest read = read_manifest(folder_.path());
  EXPECT_EQ(read.units[0].pieces.size(), whole_.units[0].pieces.size());
  int64_t bytes = 0;
  for (const ManifestPiece& piece : whole_.units[0].pieces) bytes += piece.range.bytes;
  EXPECT_EQ(verify_checkpoint(folder_.path(), nullptr, nullptr).bytes, bytes);
}

TEST_F(Shards, AReaderOfOneOpensNoOther) {
  std::filesystem::remove(folder_.path() / "rank0-index.bin");
  std::filesystem::remove(folder_.path() / "rank2-index.bin");
  Manifest text = read_manifest_text(folder_.path());
  EXPECT_TRUE(text.units[0].pieces.empty());
  const size_t one[] = {1};
  read_shards(folder_.path(), text, one);
  ASSERT_EQ(text.units[0].pieces.size(), 3u);
  EXPECT_EQ(text.units[0].pieces[0].begin, 32);
  EXPECT_THROW((void)read_manifest(folder_.path()), CheckpointError);
}

TEST_F(Shards, OneWithPiecesOfAnotherIsRefused) {
  std::filesystem::copy_file(folder_.path() / "rank1-index.bin", folder_.path() / "rank0-index.bin",
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_THROW((void)read_manifest(folder_.path()), CheckpointError);
  Manifest text = read_manifest_text(folder_.path());
  text.indexes[0].bytes = text.indexes[1].bytes;
  text.indexes[0].checksum = text.indexes[1].checksum;
  write_manifest_text(folder_.path(), text);
  try {
    (void)read_manifest(folder_.path());
    ADD_FAILURE() << "accepted";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("a piece begins at element 32 where 0 is due"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace overspill::engine
