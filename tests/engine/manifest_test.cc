#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "checkpoint_builder.h"

namespace overspill::engine {
namespace {

using testing::bytes_of;
using testing::CheckpointBuilder;
using testing::random_values;
using testing::read_file;
using testing::TemporaryFolder;
using testing::write_file;
using Json = nlohmann::json;

/// A small checkpoint with every format, several pieces a component, and a gap between two parameters.
class ManifestTest : public ::testing::Test {
 protected:
  void SetUp() override {
    CheckpointBuilder builder(path());
    builder.manifest.units.reserve(3);
    ManifestUnit& split = builder.add_unit("layer.0", "exact", "BF16", 40'000);
    CheckpointBuilder::add_segment(split, "layer.0.weight", {100, 300}, 0, {"head.weight"});
    CheckpointBuilder::add_segment(split, "layer.0.bias", {300}, 30'016);
    ManifestUnit& full = builder.add_unit("norm", "fp32", "F32", 96);
    CheckpointBuilder::add_segment(full, "norm.weight", {64}, 0);
    CheckpointBuilder::add_segment(full, "norm.conv", {4, 2, 3}, 64);
    full.segments.back().strides = {6, 1, 2};
    ManifestUnit& frozen = builder.add_unit("table", "frozen", "I64", 10);
    CheckpointBuilder::add_segment(frozen, "table", {}, 5);
    lo_ = bytes_of(random_values<int16_t>(40'000, 2));
    builder.add_component(split, "hi", bytes_of(random_values<uint16_t>(40'000, 1)), 9'999);
    builder.add_component(split, "lo", lo_, 40'000);
    builder.add_component(split, "m", bytes_of(random_values<float>(40'000, 3)), 20'000);
    builder.add_component(split, "v", bytes_of(random_values<float>(40'000, 4)), 25'001);
    for (const char* component : {"p", "m", "v"}) {
      builder.add_component(full, component, bytes_of(random_values<float>(96, 5)), 33);
    }
    builder.add_component(frozen, "hi", bytes_of(random_values<int64_t>(10, 6)), 10);
    manifest_ = builder.manifest;
    manifest_.step = 12;
    manifest_.skipped_steps = 1;
    manifest_.world = 3;
    manifest_.extra_json = R"({"scheduler": "\n\u00e4"})";
    write_manifest(path(), manifest_);
    text_ = read_file(path() / kManifestFile);
  }

  const std::filesystem::path& path() const { return folder_.path(); }

  /// Expects an error that names the manifest and, unless empty, says `part`.
  void expect_refused(const std::string& text, const std::string& part = "") {
    write_file(path() / kManifestFile, text);
    try {
      (void)read_manifest(path());
      ADD_FAILURE() << "accepted: " << text.substr(0, 300);
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find(path().string()), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " in: " << error.what();
    }
  }

  void expect_refused(const std::function<void(Json&)>& change, const std::string& part = "") {
    Json json = Json::parse(text_);
    change(json);
    expect_refused(testing::sealed(json.dump()), part);
  }

  /// An object of these fields, and a checksum that fits.
  static std::string hostile(const std::string& fields) {
    return testing::sealed(R"({"checksum":"0000000000000000",)" + fields + "}");
  }

  /// The process may take so many more bytes; what it might take before.
  static rlimit limit_memory(size_t bytes) {
    rlimit usual{};
    ::getrlimit(RLIMIT_AS, &usual);
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit less{static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE)) + bytes, usual.rlim_max};
    ::setrlimit(RLIMIT_AS, &less);
    return usual;
  }

  TemporaryFolder folder_;
  Manifest manifest_;
  std::string text_, lo_;
};

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
  EXPECT_EQ(read_file(path() / kManifestFile), text_);
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

TEST_F(ManifestTest, RefusesWhatIsNoManifest) {
  for (const char* text :
       {"", "{", "[]", "null", "7", "\"version\"", "{}", "{\"version\": 2}", "\xFF", "{\"version\": 2} x"}) {
    expect_refused(text);
  }
  expect_refused(std::string(100'000, '['), "begin with its checksum");
  expect_refused(hostile(R"("units":)" + std::string(100'000, '[')), "'units' of the manifest");
  expect_refused(hostile(R"("x":)" + std::string(100'000, '[')), "the field 'x'");
  expect_refused([](Json& json) { json["version"] = 4; }, "version is 4");
  expect_refused([](Json& json) { json["surprise"] = 1; }, "the field 'surprise'");
  expect_refused([](Json& json) { json.erase("world"); }, "no 'world'");
  expect_refused(hostile(R"("step":1,"step":1)"), "'step' twice");
  expect_refused([](Json& json) { json["world"] = 0; }, "a world of 0");
  expect_refused([](Json& json) { json["extra"] = {}; }, "'extra'");
}

/// One whose parsing was quadratic, and took 28 times its size: nothing of it is kept.
TEST_F(ManifestTest, RefusesMillionsOfEmptyObjectsInOnePassAndLittleMemory) {
  for (const std::string part : {"{},", "[],", "1,", "\"\",", "null,"}) {
    for (const char* list : {R"("units":[)", R"("units":[{"parameters":[)", R"("units":[{"components":[)",
                             R"("units":[{"parameters":[{"shape":[)"}) {
      std::string text = list;
      while (text.size() < 4'000'000) text += part;
      const std::string sealed = hostile(text);
      write_file(path() / kManifestFile, sealed);
      const rlimit usual = limit_memory(sealed.size() * 6);
      EXPECT_THROW((void)read_manifest(path()), CheckpointError) << list << part;
      ASSERT_EQ(::setrlimit(RLIMIT_AS, &usual), 0);
    }
  }
}

/// What is true of a manifest but for its size stays within ten times its size too.
TEST_F(ManifestTest, ReadsAHostileOneWhoseFieldsAreAllThereInLittleMemory) {
  const std::string piece =
      R"({"begin":0,"bytes":0,"checksums":"","component":"","elements":0,"file":"","offset":0},)";
  const std::string parameter =
      R"({"aliases":["a","b","c"],"begin":0,"elements":0,"group":0,"name":"","shape":[],"step":0,"trainable":true},)";
  const std::string unit =
      R"({"components":[],"dtype":"","elements":0,"format":"","name":"","optimizer":"","parameters":[],"pieces":[]},)";
  const auto many = [](const std::string& part, size_t bytes) {
    std::string text;
    while (text.size() < bytes) text += part;
    text.pop_back();
    return text;
  };
  const std::string rest = R"(],"version":3,"world":1)",
                    first = R"("extra":"{}","skipped_steps":0,"step":0,"units":[)";
  const std::string before =
      R"({"components":[],"dtype":"","elements":0,"format":"","name":"a","optimizer":"",)";
  for (const std::string& units :
       {many(unit, 4'000'000), before + R"("parameters":[],"pieces":[)" + many(piece, 4'000'000) + "]}",
        before + R"("pieces":[],"parameters":[)" + many(parameter, 4'000'000) + "]}"}) {
    std::string fields = first;
    fields.append(units).append(rest);
    const std::string text = hostile(fields);
    write_file(path() / kManifestFile, text);
    const rlimit usual = limit_memory(text.size() * 10);
    EXPECT_THROW((void)read_manifest(path()), CheckpointError) << units.substr(0, 200);
    ASSERT_EQ(::setrlimit(RLIMIT_AS, &usual), 0);
  }
}

TEST_F(ManifestTest, IsNotWrittenWhereNoReaderWouldTakeIt) {
  const auto bytes = static_cast<int64_t>(text_.size());
  write_manifest(path(), manifest_, bytes);
  EXPECT_EQ(read_manifest(path(), bytes).step, manifest_.step);
  EXPECT_THROW((void)read_manifest(path(), bytes - 1), CheckpointError);
  try {
    write_manifest(path(), manifest_, bytes - 1);
    ADD_FAILURE() << "written";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(bytes)), std::string::npos) << error.what();
  }
  EXPECT_EQ(read_file(path() / kManifestFile), text_);
}

TEST_F(ManifestTest, ADamagedOneIsNotParsed) {
  std::string text = text_;
  text[text.find("\"world\"") + 1] = '{';
  expect_refused(text, "damaged or edited");
}

TEST_F(ManifestTest, RefusesNumbersThatAreNone) {
  const std::vector<Json> bad = {-1,      1.5,  1e3,           "1",
                                 nullptr, true, Json::array(), std::numeric_limits<uint64_t>::max()};
  for (const Json& value : bad) {
    expect_refused([&](Json& json) { json["step"] = value; }, "'step'");
    expect_refused([&](Json& json) { json["units"][0]["elements"] = value; }, "'elements'");
    expect_refused([&](Json& json) { json["units"][0]["parameters"][0]["shape"][0] = value; }, "'shape'");
    expect_refused([&](Json& json) { json["units"][0]["pieces"][0]["offset"] = value; }, "'offset'");
  }
}

TEST_F(ManifestTest, RefusesSizesThatDoNotFit) {
  constexpr int64_t huge = std::numeric_limits<int64_t>::max();
  for (const char* key : {"begin", "elements", "offset", "bytes"}) {
    for (const int64_t value : {huge, huge - 1, huge / 2, int64_t{1} << 40, int64_t{999'999}}) {
      expect_refused([&](Json& json) { json["units"][0]["pieces"][0][key] = value; });
    }
  }
  expect_refused([&](Json& json) { json["units"][0]["elements"] = huge; });
  expect_refused([](Json& json) { json["units"][0]["elements"] = 40'001; },
                 "pieces end at element 40000 of 40001");
  expect_refused(
      [](Json& json) {
        json["units"][0]["parameters"][0]["shape"] = {100, 301};
      },
      "30000 elements in a shape of 30100");
  expect_refused([](Json& json) {  // the product is 0 modulo 2^64
    json["units"][0]["parameters"][0]["shape"] = {int64_t{1} << 32, int64_t{1} << 32};
    json["units"][0]["parameters"][0]["elements"] = 0;
  });
  expect_refused([&](Json& json) { json["units"][0]["parameters"][1]["begin"] = huge; });
  expect_refused(
      [&](Json& json) {  // begin + elements overflows, and nothing else is wrong
        Json& parameter = json["units"][1]["parameters"][0];
        parameter["shape"] = {huge};
        parameter["elements"] = huge;
        parameter["begin"] = 1;
      },
      "1 + 9223372036854775807 of 96");
  expect_refused([](Json& json) { json["units"][0]["parameters"][1]["begin"] = 39'701; },
                 "39701 + 300 of 40000");
  expect_refused([](Json& json) { json["units"][0]["parameters"][1]["begin"] = 29'999; },
                 "have element 29999");
}

TEST_F(ManifestTest, RefusesStridesThatDoNotFit) {
  constexpr int64_t huge = std::numeric_limits<int64_t>::max();
  const auto with = [](const Json& strides) {
    return [strides](Json& json) { json["units"][1]["parameters"][1]["strides"] = strides; };
  };
  for (const std::vector<int64_t>& strides : std::vector<std::vector<int64_t>>{{6, 1},
                                                                               {6, 1, 2, 1},
                                                                               {6, 0, 2},
                                                                               {6, 1, 1},
                                                                               {12, 1, 2},
                                                                               {6, 1, huge},
                                                                               {huge, huge, huge},
                                                                               {0, 0, 0}}) {
    expect_refused(with(strides), "'norm.conv' of shape (4, 2, 3) has the strides (");
  }
  expect_refused(with({6, 3, 1}), "has the strides (6, 3, 1)");  // row-major: the field is absent then
  expect_refused(with(std::vector<int64_t>(60'000, 7)), "has the strides (7, 7, 7, 7, 7, 7, 7, 7)");
  expect_refused(with(Json::array()), "empty list");
  for (const Json& strides :
       {Json(nullptr), Json(6), Json("6"), Json{6, 1, "2"}, Json{6, 1, -2}, Json{6, 1, 2.0}}) {
    expect_refused(with(strides), "'strides'");
  }
  expect_refused(
      [](Json& json) {  // beside it another field is still one too many
        json["units"][1]["parameters"][1]["surprise"] = 1;
      },
      "the field 'surprise'");
  expect_refused([](Json& json) {  // where no element is, no order is
    Json& parameter = json["units"][1]["parameters"][1];
    parameter["shape"] = {0, 2, 3};
    parameter["elements"] = 0;
  });
}

TEST_F(ManifestTest, RefusesPiecesThatDoNotCoverExactlyOnce) {
  expect_refused([](Json& json) { json["units"][0]["pieces"].erase(0); });
  expect_refused([](Json& json) { json["units"][0]["pieces"] = Json::array(); });
  expect_refused([](Json& json) { json["units"][0]["pieces"].push_back(json["units"][0]["pieces"][0]); });
  expect_refused([](Json& json) { json["units"][0]["pieces"][0]["component"] = "w"; }, "component 'w'");
  expect_refused([](Json& json) { json["units"][1]["pieces"][0]["component"] = "lo"; },
                 "component 'lo', format fp32");
  expect_refused([](Json& json) { json["units"][2]["pieces"][0]["component"] = "m"; });
  expect_refused([](Json& json) { json["units"][0]["pieces"][0]["elements"] = 0; });
  expect_refused([](Json& json) { json["units"][0]["format"] = "fp32"; }, "fp32 and the dtype BF16");
  expect_refused([](Json& json) { json["units"][0]["format"] = "fp8"; }, "unknown format");
  expect_refused([](Json& json) { json["units"][2]["dtype"] = "I65"; }, "unknown dtype");
  // Two elements fewer in one piece: 80 000 bytes of its range still fit, but a gap is left.
  expect_refused([](Json& json) {
    json["units"][0]["pieces"][0]["elements"] = json["units"][0]["pieces"][0]["elements"].get<int64_t>() - 2;
  });
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
  EXPECT_EQ(read_file(path() / kManifestFile), text_) << "what was read is of version 3 now";
  json["units"][0]["format"] = "exact";  // no name of that time
  expect_refused(testing::sealed(json.dump()), "unknown format 'exact'");
  json["units"][0]["format"] = "bf16_split";
  json["units"][0]["optimizer"] = "adam";
  expect_refused(testing::sealed(json.dump()), "where version 2 has 0");
}

TEST_F(ManifestTest, RefusesComponentsThatDoNotBelong) {
  expect_refused([](Json& json) { json["units"][0]["optimizer"] = "adamw"; }, "unknown format");
  expect_refused([](Json& json) { json["units"][0]["optimizer"] = "lion"; },
                 "other components than lion exact");
  expect_refused([](Json& json) { json["units"][2]["optimizer"] = "adam"; }, "unknown format");
  expect_refused([](Json& json) { json["units"][0]["components"].push_back("w"); }, "other components");
  expect_refused([](Json& json) { json["units"][0]["components"] = Json::array(); }, "other components");
  expect_refused([](Json& json) { json["units"][0].erase("components"); }, "where version 3 has 3");
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

TEST_F(ManifestTest, RefusesChecksumsThatDoNotFit) {
  const auto change = [](const std::function<void(std::string&)>& edit) {
    return [edit](Json& json) { edit(json["units"][0]["pieces"][0]["checksums"].get_ref<std::string&>()); };
  };
  expect_refused(change([](std::string& hex) { hex.resize(hex.size() - 16); }), "checksums for");
  expect_refused(change([](std::string& hex) { hex += std::string(16, '0'); }), "checksums for");
  expect_refused(change([](std::string& hex) { hex += "0"; }), "16 digits");
  expect_refused(change([](std::string& hex) { hex[3] = 'g'; }), "hexadecimal");
  expect_refused(change([](std::string& hex) { hex[0] = '-'; }), "hexadecimal");
}

TEST_F(ManifestTest, RefusesNames) {
  for (const char* name :
       {"", ".", "..", "../data-0.slab", "/etc/passwd", "a/b", "a\\b", "a..b", "no-such-file"}) {
    expect_refused([&](Json& json) { json["units"][0]["pieces"][0]["file"] = name; });
  }
  expect_refused(
      [](Json& json) { json["units"][0]["pieces"][0]["file"] = std::string("data-0.slab\0x", 13); });
  expect_refused([](Json& json) { json["units"][0]["pieces"][0]["file"] = std::string(256, 'a'); });
  expect_refused([](Json& json) { json["units"][1]["name"] = "layer.0"; }, "two units");
  expect_refused([](Json& json) { json["units"][1]["parameters"][0]["name"] = "layer.0.bias"; },
                 "two parameters");
  expect_refused([](Json& json) { json["units"][1]["parameters"][0]["name"] = "head.weight"; },
                 "two parameters");
  expect_refused([](Json& json) { json["units"][1]["parameters"][0]["name"] = "__metadata__"; });
  expect_refused([](Json& json) { json["units"][1]["parameters"][0]["name"] = ""; });
}

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

/// One random edit of a text that was JSON.
void mutate(std::string& text, std::mt19937& random) {
  static const std::vector<std::string> kNasty = {"-1",
                                                  "9223372036854775807",
                                                  "9223372036854775808",
                                                  "18446744073709551615",
                                                  "1e999",
                                                  "0",
                                                  "[",
                                                  "{",
                                                  "]",
                                                  "}",
                                                  "\"",
                                                  ",",
                                                  "null",
                                                  "\\u0000",
                                                  "..",
                                                  "/",
                                                  "\xC0",
                                                  "65536"};
  const size_t at = random() % text.size();
  switch (random() % 6) {
    case 0:
      text[at] = static_cast<char>(random());
      break;
    case 1:
      text.erase(at, 1 + random() % 20);
      break;
    case 2:
      text.insert(at, text.substr(random() % text.size(), random() % 60));
      break;
    case 3:
      text.resize(at + 1);
      break;
    case 4:
      text.insert(at, kNasty[random() % kNasty.size()]);
      break;
    default: {  // a whole number becomes another
      const size_t begin = text.find_first_of("0123456789", at);
      if (begin == std::string::npos) break;
      const size_t end = std::min(text.find_first_not_of("0123456789", begin), text.size());
      text.replace(begin, end - begin, kNasty[random() % kNasty.size()]);
    }
  }
}

TEST_F(ManifestTest, AFlippedBitAnywhereIsRefused) {
  for (size_t i = 0; i < text_.size(); ++i) {
    std::string text = text_;
    text[i] = static_cast<char>(text[i] ^ 1 << i % 7);
    expect_refused(text);
  }
  expect_refused(text_ + " ", "checksum");
  expect_refused(" " + text_, "does not begin with its checksum");
  expect_refused(
      [](Json& json) {
        json.erase("checksum");
        json["Checksum"] = "0000000000000000";
      },
      "does not begin with its checksum");
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

TEST_F(ManifestTest, SurvivesAnyEdit) {
  int accepted = 0;
  for (uint32_t seed = 0; seed < 6000; ++seed) {
    std::mt19937 random(seed);
    std::string text = text_;
    for (uint32_t edits = 1 + random() % 3; edits > 0 && !text.empty(); --edits) mutate(text, random);
    write_file(path() / kManifestFile, testing::sealed(text));
    try {
      const Manifest read = read_manifest(path());
      ++accepted;
      // Whatever was accepted can be used: every range is there, as long as it says, or is found to be
      // corrupt.
      for (const ManifestUnit& unit : read.units) {
        for (const ManifestPiece& piece : unit.pieces) {
          std::vector<std::byte> to(piece.range.bytes);
          try {
            read_range(path(), piece.range, to);
          } catch (const CheckpointError&) {
          }
        }
      }
    } catch (const CheckpointError& error) {
      ASSERT_NE(std::string(error.what()).find(path().string()), std::string::npos) << "seed " << seed;
    } catch (const std::exception& error) {
      FAIL() << "seed " << seed << ": " << error.what();
    }
  }
  EXPECT_GT(accepted, 10);  // else the edits were too wild to test anything
}

}  // namespace
}  // namespace overspill::engine
