// What the tests of manifests share: a small checkpoint, and its manifest's text to be changed.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/engine/checkpoint_builder.h"

namespace overspill::engine::testing {

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
    newest_ = read_file(path() / kManifestFile);
    text_ = version_3(manifest_);
    write_file(path() / kManifestFile, text_);
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
    expect_change_refused(text_, change, part);
  }

  void expect_change_refused(const std::string& text, const std::function<void(Json&)>& change,
                             const std::string& part = "") {
    Json json = Json::parse(text);
    change(json);
    expect_refused(sealed(json.dump()), part);
  }

  TemporaryFolder folder_;
  Manifest manifest_;
  std::string text_;    // of version 3, with all of its pieces: more can be wrong with it
  std::string newest_;  // of today's version; its index is in the folder
  std::string lo_;
};

}  // namespace overspill::engine::testing
