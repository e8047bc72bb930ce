// Texts that are no manifest, by accident or on purpose: each is refused, in little time and memory.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/engine/checkpoint_builder.h"
#include "tests/engine/manifest_test.h"

namespace overspill::engine {
namespace {

using testing::Json;
using testing::ManifestTest;
using testing::write_file;

/// An object of these fields, and a checksum that fits.
std::string hostile(const std::string& fields) {
  return testing::sealed(R"({"checksum":"0000000000000000",)" + fields + "}");
}

/// The process may take so many more bytes; what it might take before.
rlimit limit_memory(size_t bytes) {
  rlimit usual{};
  ::getrlimit(RLIMIT_AS, &usual);
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlimit less{static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE)) + bytes, usual.rlim_max};
  ::setrlimit(RLIMIT_AS, &less);
  return usual;
}

TEST_F(ManifestTest, RefusesWhatIsNoManifest) {
  for (const char* text :
       {"", "{", "[]", "null", "7", "\"version\"", "{}", "{\"version\": 2}", "\xFF", "{\"version\": 2} x"}) {
    expect_refused(text);
  }
  expect_refused(std::string(100'000, '['), "begin with its checksum");
  expect_refused(hostile(R"("units":)" + std::string(100'000, '[')), "'units' of the manifest");
  expect_refused(hostile(R"("x":)" + std::string(100'000, '[')), "the field 'x'");
  expect_refused([](Json& json) { json["version"] = 5; }, "version is 5");
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

TEST_F(ManifestTest, ADamagedOneIsNotParsed) {
  std::string text = text_;
  text[text.find("\"world\"") + 1] = '{';
  expect_refused(text, "damaged or edited");
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
