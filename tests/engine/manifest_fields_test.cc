// Manifests whose fields say what cannot be: each is refused by name, before anything is read or allocated
// for it.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/engine/checkpoint_builder.h"
#include "tests/engine/manifest_test.h"

namespace overspill::engine {
namespace {

using testing::Json;
using testing::ManifestTest;

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

TEST_F(ManifestTest, RefusesComponentsThatDoNotBelong) {
  expect_refused([](Json& json) { json["units"][0]["optimizer"] = "adamw"; }, "unknown format");
  expect_refused([](Json& json) { json["units"][0]["optimizer"] = "lion"; },
                 "other components than lion exact");
  expect_refused([](Json& json) { json["units"][2]["optimizer"] = "adam"; }, "unknown format");
  expect_refused([](Json& json) { json["units"][0]["components"].push_back("w"); }, "other components");
  expect_refused([](Json& json) { json["units"][0]["components"] = Json::array(); }, "other components");
  expect_refused([](Json& json) { json["units"][0].erase("components"); }, "where version 3 has 3");
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

}  // namespace
}  // namespace overspill::engine
