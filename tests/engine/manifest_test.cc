// Manifests that are written and read again, in whole and in the parts of their files.
#include "tests/engine/manifest_test.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/engine/checkpoint_builder.h"

namespace overspill::engine {
namespace {

using testing::CheckpointBuilder;
using testing::Json;
using testing::ManifestTest;
using testing::read_file;
using testing::TemporaryFolder;
using testing::write_file;

TEST_F(ManifestTest, RoundTrips) {
  const Manifest read = read_manifest(path());
  EXPECT_EQ(read.step, 12);
  EXPECT_EQ(read.skipped_steps, 1);
  EXPECT_EQ(read.world, 3);
  EXPECT_EQ(read.extra_json, manifest_.extra_json);
  ASSERT_EQ(read.units.size(), 3u);
  const ManifestUnit &unit = read.units[0], &expected = manifest_.units[0];
  EXPECT_EQ(unit.name, "layer.0");
  EXPECT_EQ(unit.optimizer, "adam");
  EXPECT_EQ(unit.format, "exact");
  EXPECT_EQ(unit.components, (std::vector<std::string>{"hi", "lo", "m", "v"}));
  EXPECT_EQ(read.units[2].optimizer, "");
  EXPECT_EQ(unit.dtype, "BF16");
  EXPECT_EQ(unit.elements, 40'000);
  ASSERT_EQ(unit.segments.size(), 2u);
  EXPECT_EQ(unit.segments[0].aliases, std::vector<std::string>{"head.weight"});
  EXPECT_EQ(unit.segments[1].shape, std::vector<int64_t>{300});
  EXPECT_EQ(unit.segments[1].begin, 30'016);
  EXPECT_EQ(unit.segments[1].step, 3);
  EXPECT_TRUE(unit.segments[1].trainable);
  EXPECT_FALSE(read.units[2].segments[0].trainable);
  EXPECT_TRUE(unit.segments[0].strides.empty());
  EXPECT_EQ(read.units[1].segments[1].strides, (std::vector<int64_t>{6, 1, 2}));
  EXPECT_FALSE(Json::parse(text_)["units"][0]["parameters"][0].contains("strides"));
  ASSERT_EQ(unit.pieces.size(), expected.pieces.size());
  for (size_t i = 0; i < unit.pieces.size(); ++i) {
    EXPECT_EQ(unit.pieces[i].component, expected.pieces[i].component);
    EXPECT_EQ(unit.pieces[i].begin, expected.pieces[i].begin);
    EXPECT_EQ(unit.pieces[i].elements, expected.pieces[i].elements);
    EXPECT_EQ(unit.pieces[i].range.file, expected.pieces[i].range.file);
    EXPECT_EQ(unit.pieces[i].range.offset, expected.pieces[i].range.offset);
    EXPECT_EQ(unit.pieces[i].range.bytes, expected.pieces[i].range.bytes);
    EXPECT_EQ(unit.pieces[i].range.block_checksums, expected.pieces[i].range.block_checksums);
  }
  write_manifest(path(), read);  // replaces the old one
  EXPECT_EQ(read_file(path() / kManifestFile), newest_);
  write_manifest(path(), read_manifest(path()));
  EXPECT_EQ(read_file(path() / kManifestFile), newest_);
  EXPECT_FALSE(std::filesystem::exists(path() / "manifest.json.tmp"));
}

TEST_F(ManifestTest, WhatCouldNotBeReadIsNotWritten) {
  Manifest wrong = manifest_;
  wrong.units[0].pieces.pop_back();
  EXPECT_THROW(write_manifest(path(), wrong), CheckpointError);
  wrong = manifest_;
  wrong.units[0].segments[0].name = "\xFF\xFE";
  EXPECT_THROW(write_manifest(path(), wrong), CheckpointError);
  EXPECT_EQ(read_file(path() / kManifestFile), text_);  // the last good one
  write_file(path() / "manifest.json.tmp", "of a save that was cut off");
  write_manifest(path(), manifest_);
  EXPECT_FALSE(std::filesystem::exists(path() / "manifest.json.tmp"));
}

TEST_F(ManifestTest, IsNotWrittenWhereNoReaderWouldTakeIt) {
  const auto bytes = static_cast<int64_t>(newest_.size());
  write_manifest(path(), manifest_, bytes);
  EXPECT_EQ(read_manifest(path(), bytes).step, manifest_.step);
  EXPECT_THROW((void)read_manifest(path(), bytes - 1), CheckpointError);
  try {
    write_manifest(path(), manifest_, bytes - 1);
    ADD_FAILURE() << "written";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
  }
  EXPECT_EQ(read_file(path() / kManifestFile), newest_);
}

TEST_F(ManifestTest, ReadsVersion2) {
  Json json = Json::parse(text_);
  json["version"] = 2;
  for (Json& unit : json["units"]) {
    unit.erase("optimizer");
    unit.erase("components");
    if (unit["format"] == "exact") unit["format"] = "bf16_split";
    for (Json& piece : unit["pieces"]) {
      if (piece["component"] == "p") piece["component"] = "hi";
    }
  }
  write_file(path() / kManifestFile, testing::sealed(json.dump()));
  write_manifest(path(), read_manifest(path()));
  EXPECT_EQ(read_file(path() / kManifestFile), newest_) << "what was read is of today's version now";
  json["units"][0]["format"] = "exact";  // no name of that time
  expect_refused(testing::sealed(json.dump()), "unknown format 'exact'");
  json["units"][0]["format"] = "bf16_split";
  json["units"][0]["optimizer"] = "adam";
  expect_refused(testing::sealed(json.dump()), "where version 2 has 0");
}

TEST(ManifestScales, LieBehindThePiecesCodes) {
  TemporaryFolder folder;
  CheckpointBuilder builder(folder.path());
  builder.manifest.units.reserve(1);
  ManifestUnit& unit = builder.add_unit("u", "8bit", "BF16", 256);
  CheckpointBuilder::add_segment(unit, "u.w", {256}, 0);
  builder.add_component(unit, "hi", std::string(512, 'h'), 99);
  builder.add_component(unit, "lo", std::string(256, 'l'), 256);
  const auto add = [&](const char* component, int64_t begin, int64_t elements, int64_t bytes) {
    builder.add_piece(unit, component, begin, elements, std::string(static_cast<size_t>(bytes), 's'));
  };
  add("m", 0, 128, 130);
  add("m", 128, 128, 130);
  add("v", 0, 256, 260);
  const Manifest whole = builder.manifest;
  write_manifest(folder.path(), whole);
  EXPECT_EQ(read_manifest(folder.path()).units[0].pieces.size(), unit.pieces.size());
  const auto refusal = [&](const Manifest& manifest) {
    try {
      write_manifest(folder.path(), manifest);
    } catch (const CheckpointError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  Manifest wrong = whole;
  wrong.units[0].pieces.back().range.bytes = 259;  // a scale is missing
  EXPECT_NE(refusal(wrong).find("259 bytes of"), std::string::npos) << refusal(wrong);
  wrong = whole;
  auto& pieces = wrong.units[0].pieces;
  pieces[pieces.size() - 3].elements = 127;
  pieces[pieces.size() - 2].begin = 127;  // a block in two pieces
  EXPECT_NE(refusal(wrong).find("begins at element 127, inside a block"), std::string::npos)
      << refusal(wrong);
}

TEST_F(ManifestTest, ReadsEveryPartOfARange) {
  FileRange range;
  for (const ManifestPiece& piece : manifest_.units[0].pieces) {
    if (piece.component == "lo") range = piece.range;
  }
  ASSERT_GT(range.bytes, 65'536);
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int64_t size = static_cast<int64_t>(lo_.size());
    const int64_t begin = round == 0 ? 0 : random() % size;
    const int64_t count = round == 0 ? size : random() % (size - begin + 1);
    std::vector<std::byte> to(count + 2, std::byte{0x5A});
    read_range_part(path(), range, begin, std::span(to).subspan(1, count));
    ASSERT_EQ(std::memcmp(to.data() + 1, lo_.data() + begin, count), 0);
    ASSERT_EQ(to.front(), std::byte{0x5A});
    ASSERT_EQ(to.back(), std::byte{0x5A});
  }
  std::vector<std::byte> too_long(range.bytes + 1);
  EXPECT_THROW(read_range(path(), range, too_long), CheckpointError);
  EXPECT_THROW(read_range_part(path(), range, std::numeric_limits<int64_t>::max(), too_long),
               CheckpointError);
  EXPECT_THROW(read_range_part(path(), range, -1, too_long), CheckpointError);
}

}  // namespace
}  // namespace overspill::engine
