// Folders as they should be, and as somebody who means harm would make them.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "inference/error.h"
#include "inference/format/model_folder.h"
#include "tests/inference/temporary_folder.h"

namespace overspill::inference {
namespace {

namespace fs = std::filesystem;

std::string one(const std::string& name) {
  return safetensors("{\"" + name + R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4);
}

std::string refusal(const fs::path& folder) {
  try {
    const ModelFolder opened(folder);
  } catch (const ModelError& error) {
    return error.what();
  }
  return "";
}

TEST(Folder, EndTokensAreThoseOfBothFiles) {
  const TemporaryFolder folder;
  folder.write("config.json", R"({"eos_token_id": 2})");
  folder.write("generation_config.json", R"({"eos_token_id": [7, 2, 9]})");
  folder.write("model.safetensors", one("a"));
  const ModelFolder opened(folder.path());
  EXPECT_EQ(opened.end_tokens(), (std::vector<int32_t>{7, 2, 9}));
  ASSERT_NE(opened.find("a"), nullptr);
  EXPECT_EQ(opened.find("b"), nullptr);
  std::vector<std::byte> bytes(4);
  opened.read(*opened.find("a"), 0, bytes);
  EXPECT_THROW(opened.read(*opened.find("a"), 1, bytes), std::out_of_range);
  EXPECT_THROW(opened.read(*opened.find("a"), -1, std::span(bytes).first(1)), std::out_of_range);
  for (const char* wrong : {"-1", "\"2\"", "1.5", "[[2]]", "4294967296", "{}"}) {
    folder.write("config.json", std::string(R"({"eos_token_id": )") + wrong + "}");
    EXPECT_NE(refusal(folder.path()).find("eos_token_id"), std::string::npos) << wrong;
  }
}

TEST(Folder, AFileThatBecameShorterIsAnError) {
  const TemporaryFolder folder;
  folder.write("config.json", "{}");
  folder.write("model.safetensors", one("a"));
  const ModelFolder opened(folder.path());
  fs::resize_file(folder.path() / "model.safetensors",
                  fs::file_size(folder.path() / "model.safetensors") - 2);
  std::vector<std::byte> bytes(4);
  EXPECT_THROW(opened.read(*opened.find("a"), 0, bytes), ModelError);
}

TEST(Folder, LinksThatLeadOutAreNotRead) {
  const TemporaryFolder outside, folder;
  outside.write("secret.json", "{}");
  outside.write("weights", one("a"));
  folder.write("config.json", "{}");
  folder.write("inside", one("a"));
  fs::create_symlink("inside", folder.path() / "model.safetensors");
  EXPECT_EQ(refusal(folder.path()), "");
  fs::remove(folder.path() / "model.safetensors");
  fs::create_symlink(outside.path() / "weights", folder.path() / "model.safetensors");
  EXPECT_NE(refusal(folder.path()).find("not in the folder"), std::string::npos);
  fs::remove(folder.path() / "model.safetensors");
  folder.write("model.safetensors", one("a"));
  fs::remove(folder.path() / "config.json");
  fs::create_symlink(outside.path() / "secret.json", folder.path() / "config.json");
  EXPECT_NE(refusal(folder.path()).find("not in the folder"), std::string::npos);
  // A folder whose name begins with the folder's own is another one.
  const fs::path sibling = folder.path().string() + "-other";
  fs::create_directory(sibling);
  fs::rename(outside.path() / "secret.json", sibling / "config.json");
  fs::remove(folder.path() / "config.json");
  fs::create_symlink(sibling / "config.json", folder.path() / "config.json");
  EXPECT_NE(refusal(folder.path()).find("not in the folder"), std::string::npos);
  fs::remove_all(sibling);
}

TEST(Folder, TheHubsCacheIsRead) {
  const TemporaryFolder hub;
  hub.write("models--x/blobs/1", "{}");
  hub.write("models--x/blobs/2", one("a"));
  hub.write("elsewhere", one("a"));
  const fs::path snapshot = hub.path() / "models--x" / "snapshots" / "abc";
  fs::create_directories(snapshot);
  fs::create_symlink("../../blobs/1", snapshot / "config.json");
  fs::create_symlink("../../blobs/2", snapshot / "model.safetensors");
  EXPECT_EQ(refusal(snapshot), "");
  const fs::path link = hub.path() / "link";
  fs::create_directory_symlink(snapshot, link);
  EXPECT_EQ(refusal(link), "");
  fs::remove(snapshot / "model.safetensors");
  fs::create_symlink("../../../elsewhere", snapshot / "model.safetensors");
  EXPECT_NE(refusal(snapshot).find("not in the folder"), std::string::npos);
}

TEST(Folder, WhatIsNoRegularFile) {
  const TemporaryFolder folder;
  folder.write("config.json", "{}");
  ASSERT_EQ(::mkfifo((folder.path() / "model.safetensors").c_str(), 0600), 0);
  EXPECT_NE(refusal(folder.path()).find("no regular file"), std::string::npos);
  fs::remove(folder.path() / "model.safetensors");
  EXPECT_NE(refusal(folder.path()).find("neither"), std::string::npos);
  fs::create_symlink("nowhere", folder.path() / "model.safetensors");
  EXPECT_NE(refusal(folder.path()).find("No such file"), std::string::npos);
  EXPECT_NE(refusal(folder.path() / "missing").find("is no folder"), std::string::npos);
}

TEST(Folder, AnIndexAndItsFilesAgree) {
  const TemporaryFolder folder;
  folder.write("config.json", "{}");
  folder.write("1.safetensors", one("a"));
  folder.write("2.safetensors", one("b"));
  const auto with = [&](const std::string& map) {
    folder.write("model.safetensors.index.json", R"({"metadata":{},"weight_map":)" + map + "}");
    return refusal(folder.path());
  };
  EXPECT_EQ(with(R"({"a":"1.safetensors","b":"2.safetensors"})"), "");
  EXPECT_EQ(with(R"({"a":"1.safetensors"})"), "");  // the other file is not named, and is not read
  EXPECT_NE(with(R"({"a":"2.safetensors","b":"1.safetensors"})").find("says otherwise"), std::string::npos);
  EXPECT_NE(with(R"({"a":"1.safetensors","c":"1.safetensors"})").find("lacks 'c'"), std::string::npos);
  EXPECT_NE(with(R"({"a":"1.safetensors","a":"1.safetensors"})").find("twice"), std::string::npos);
  EXPECT_NE(with(R"({"a":"../1.safetensors"})").find("same folder"), std::string::npos);
  EXPECT_NE(with(R"({"a":"1.safetensors/"})").find("same folder"), std::string::npos);
  EXPECT_NE(with(R"({"a":"1.bin"})").find("same folder"), std::string::npos);
  EXPECT_NE(with(R"({"a":5})").find("same folder"), std::string::npos);
  EXPECT_NE(with("{}").find("no weight_map"), std::string::npos);
  EXPECT_NE(with("[]").find("no weight_map"), std::string::npos);
  folder.write("2.safetensors", one("a"));
  EXPECT_NE(with(R"({"a":"1.safetensors","b":"2.safetensors"})").find("in two files"), std::string::npos);
}

TEST(Folder, ConfigsThatAreNoJson) {
  const TemporaryFolder folder;
  folder.write("model.safetensors", one("a"));
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "[";
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[]"), R"({"a":1,"a":2})" + std::string(),
        std::string("{\"a\":\"\xff\"}"), "{\"a\":" + deep, std::string("{\"a\":1e999}")}) {
    folder.write("config.json", text);
    EXPECT_NE(refusal(folder.path()).find("config.json"), std::string::npos) << text.substr(0, 50);
  }
  folder.write("config.json", "{\"a\":\"" + std::string(5 << 20, 'x') + "\"}");
  EXPECT_NE(refusal(folder.path()).find("no such file has more"), std::string::npos);
}

}  // namespace
}  // namespace overspill::inference
