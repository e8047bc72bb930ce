#include "inference/format/safetensors.h"

#include <gtest/gtest.h>

#include <string>

#include "inference/error.h"

namespace overspill::inference {
namespace {

/// The message of the error for a header in a file with `data_bytes` behind it; "" where there is none.
std::string refusal(const std::string& header, int64_t data_bytes) {
  try {
    parse_header(header, kHeaderLengthBytes + static_cast<int64_t>(header.size()) + data_bytes,
                 "a.safetensors");
  } catch (const ModelError& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("a.safetensors: ")) << error.what();
    return error.what();
  }
  return "";
}

TEST(Safetensors, AHeaderGivesTensorsInTheOrderOfTheirBytes) {
  const std::string header =
      R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]},"__metadata__":{"format":"pt"},)"
      R"("a":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,12]},"none":{"dtype":"I64","shape":[0],"data_offsets":[20,20]},)"
      R"("one":{"dtype":"U8","shape":[],"data_offsets":[20,21]}})";
  const int64_t begin = kHeaderLengthBytes + static_cast<int64_t>(header.size());
  const auto tensors = parse_header(header, begin + 21, "a.safetensors");
  ASSERT_EQ(tensors.size(), 4u);
  EXPECT_EQ(tensors[0].name, "a");
  EXPECT_EQ(tensors[0].dtype, "BF16");
  EXPECT_EQ(tensors[0].shape, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(tensors[0].offset, begin);
  EXPECT_EQ(tensors[0].bytes, 12);
  EXPECT_EQ(tensors[1].offset, begin + 12);
  EXPECT_EQ(tensors[2].bytes, 0);
  EXPECT_EQ(tensors[3].elements(), 1);
}

TEST(Safetensors, LengthsThatNoHeaderHas) {
  const auto length = [](uint64_t value, int64_t file_bytes) {
    std::string first;
    for (int i = 0; i < 8; ++i) first += static_cast<char>(value >> 8 * i & 0xFF);
    return header_bytes(first, file_bytes, "a");
  };
  EXPECT_EQ(length(2, 10), 2);
  EXPECT_THROW(length(3, 10), ModelError);
  EXPECT_THROW(length(uint64_t{1} << 63, 10), ModelError);
  EXPECT_THROW(length(~uint64_t{0}, 10), ModelError);
  EXPECT_EQ(length(kHeaderBytesMax, int64_t{1} << 40), kHeaderBytesMax);
  EXPECT_THROW(length(kHeaderBytesMax + 1, int64_t{1} << 40), ModelError);
  EXPECT_THROW(header_bytes("1234567", 7, "a"), ModelError);
  EXPECT_THROW(header_bytes("", 0, "a"), ModelError);
}

TEST(Safetensors, EntriesThatCannotBe) {
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"t":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  EXPECT_EQ(refusal(entry(R"("F32")", "[2]", "[0,8]"), 8), "");
  EXPECT_NE(refusal(entry(R"("F32")", "[3]", "[0,8]"), 8), "");                    // size
  EXPECT_NE(refusal(entry(R"("F33")", "[2]", "[0,8]"), 8), "");                    // dtype
  EXPECT_NE(refusal(entry(R"("F4")", "[3]", "[0,1]"), 1), "");                     // half a byte
  EXPECT_NE(refusal(entry(R"("F32")", "[4611686018427387904]", "[0,0]"), 0), "");  // 2^62 * 32 bits = 2^67
  EXPECT_NE(refusal(entry(R"("F32")", "[4294967296,4294967296]", "[0,0]"), 0), "");
  EXPECT_NE(refusal(entry(R"("F32")", "[0,9223372036854775808]", "[0,0]"), 0), "");  // no int64
  EXPECT_NE(refusal(entry(R"("F32")", "[-2]", "[0,8]"), 8), "");
  EXPECT_NE(refusal(entry(R"("F32")", "[2.0]", "[0,8]"), 8), "");
  EXPECT_NE(refusal(entry(R"("F32")", "[[2]]", "[0,8]"), 8), "");
  EXPECT_NE(refusal(entry(R"("F32")", "2", "[0,8]"), 8), "");
  EXPECT_NE(refusal(entry(R"("F32")", "[2]", "[8,0]"), 8), "");
  EXPECT_NE(refusal(entry(R"("F32")", "[2]", "[0,8,9]"), 8), "");
  EXPECT_NE(refusal(entry(R"("F32")", "[2]", "[0]"), 8), "");
  EXPECT_NE(refusal(entry("null", "[2]", "[0,8]"), 8), "");
  EXPECT_NE(refusal(entry("5", "[2]", "[0,8]"), 8), "");
  EXPECT_NE(refusal(entry(R"("F32")", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2]", "[0,8]"), 8), "");
  EXPECT_NE(refusal(R"({"t":{"dtype":"F32","shape":[2]}})", 8), "");
  EXPECT_NE(refusal(R"({"t":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", 8), "");
  EXPECT_NE(refusal(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}})", 8), "");
}

TEST(Safetensors, TensorsTileTheFile) {
  const auto two = [](const std::string& first, const std::string& second, int64_t bytes) {
    return refusal(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
                       R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}",
                   bytes);
  };
  EXPECT_EQ(two("[0,4]", "[4,8]", 8), "");
  EXPECT_EQ(two("[4,8]", "[0,4]", 8), "");
  EXPECT_NE(two("[0,4]", "[3,7]", 8), "");  // overlap
  EXPECT_NE(two("[0,4]", "[0,4]", 4), "");  // the same bytes
  EXPECT_NE(two("[0,4]", "[5,9]", 9), "");  // a hole
  EXPECT_NE(two("[0,4]", "[4,8]", 7), "");  // cut off
  EXPECT_NE(two("[0,4]", "[4,8]", 9), "");  // something behind
  EXPECT_NE(two("[0,4]", "[9223372036854775803,9223372036854775807]", 8), "");
}

TEST(Safetensors, WhatIsNoHeader) {
  for (const char* text : {"", "{", "[]", "5", "null", "\"a\"", "{\"a\":5}", "{\"a\":[]}", "{\"a\":{}}",
                           "{}}", "{\"a\":{\"dtype\":{\"dtype\":\"F32\"}}}", "{\"__metadata__\":{\"a\":5}}",
                           "{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", "{\"\xff\":{}}"}) {
    EXPECT_NE(refusal(text, 0), "") << text;
  }
  EXPECT_EQ(refusal("{}", 0), "");
  EXPECT_EQ(refusal("{}   ", 0), "");  // headers are padded by spaces
  const std::string one = R"("t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  EXPECT_NE(refusal("{" + one + "," + one + "}", 0), "");
  const std::string deep(1 << 20, '[');
  EXPECT_NE(refusal("{\"a\":" + deep, 0), "");
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  EXPECT_NE(refusal(objects, 0), "");
}

}  // namespace
}  // namespace overspill::inference
