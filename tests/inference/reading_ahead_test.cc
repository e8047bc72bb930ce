#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <bit>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "inference/error.h"
#include "inference/run/experts.h"
#include "inference/run/stream.h"
#include "tests/inference/temporary_folder.h"

namespace overspill::inference {
namespace {

constexpr int64_t kStoredRows = 70, kStoredColumns = 6;  // two panels, the second not full
constexpr int kUsers = 3;

/// A folder with matrices in bf16, of which matrix i is all i + 1 (exact up to 256).
class StoredMatrices {
 public:
  explicit StoredMatrices(int count) : specs_(static_cast<size_t>(count)), views_(specs_.size()) {
    nlohmann::json header;
    std::string data;
    for (int i = 0; i < count; ++i) {
      const std::string name = fmt::format("m{}", i);
      const size_t bytes = 2 * kStoredRows * kStoredColumns;
      header[name] = {{"dtype", "BF16"},
                      {"shape", {kStoredRows, kStoredColumns}},
                      {"data_offsets", {data.size(), data.size() + bytes}}};
      const uint32_t bits = std::bit_cast<uint32_t>(value_of(i)) >> 16;
      for (int64_t element = 0; element < kStoredRows * kStoredColumns; ++element) {
        data += static_cast<char>(bits & 0xFF);
        data += static_cast<char>(bits >> 8);
      }
      specs_[static_cast<size_t>(i)] = {.parts = {{.tensor = name, .count = kStoredRows}},
                                        .columns = kStoredColumns};
      views_[static_cast<size_t>(i)] = {.rows = kStoredRows, .columns = kStoredColumns};
    }
    folder_.write("config.json", "{}");
    folder_.write("model.safetensors", safetensors(header.dump(), 0) + data);
  }

  static float value_of(int matrix) { return static_cast<float>(matrix + 1); }
  WantedMatrix wanted(int matrix) {
    return {&specs_[static_cast<size_t>(matrix)], &views_[static_cast<size_t>(matrix)]};
  }
  /// Whether its view shows the matrix, whole.
  bool is_there(int matrix) const {
    std::vector<float> row(kStoredColumns);
    for (int64_t i = 0; i < kStoredRows; ++i) {
      views_[static_cast<size_t>(matrix)].copy_row(i, row.data());
      if (std::ranges::count(row, value_of(matrix)) != kStoredColumns) return false;
    }
    return true;
  }
  ModelFolder open() const { return ModelFolder(folder_.path()); }
  /// What was open becomes as short as its header.
  void cut() const { std::filesystem::resize_file(folder_.path() / "model.safetensors", 4096); }

 private:
  TemporaryFolder folder_;
  std::vector<MatrixSpec> specs_;
  std::vector<Matrix> views_;
};

/// Calls work(user) on threads of as many users.
template <class Work>
void run_users(Work work) {
  std::vector<std::thread> threads;
  for (int user = 0; user < kUsers; ++user) threads.emplace_back(work, user);
  for (std::thread& thread : threads) thread.join();
}

/// Layers 1 and 3 of a model, each with `experts` of two matrices.
class Experts : public testing::Test {
 protected:
  static constexpr int kExperts = 9;

  Experts() {
    for (int layer = 0; layer < 2; ++layer) {
      LayerExperts& made = layers_.emplace_back();
      made.layer = 2 * static_cast<size_t>(layer) + 1;
      made.chosen = 4;
      for (int expert = 0; expert < kExperts; ++expert) {
        const int first = matrix_of(layer, expert);
        made.experts.push_back({stored_.wanted(first), stored_.wanted(first + 1)});
      }
    }
  }
  static int matrix_of(int layer, int expert) { return 2 * (layer * kExperts + expert); }

  /// One user's part of `passes`: wrong views that it saw, or -1 where an expert could not be had.
  int use(ExpertStore& store, int user, int passes) const {
    std::mt19937 random(5);  // all users draw alike, as all compute alike
    int wrong = 0;
    for (int pass = 0; pass < passes; ++pass) {
      for (int layer = 0; layer < 2; ++layer) {
        std::vector<int32_t> wanted;
        for (int expert = 0; expert < kExperts; ++expert) {
          if (random() % 3 == 0) wanted.push_back(expert);
        }
        store.want(user, layers_[static_cast<size_t>(layer)].layer, wanted);
        for (const int32_t expert : wanted) {
          if (!store.acquire(user, layers_[static_cast<size_t>(layer)].layer, expert)) return -1;
          const int first = matrix_of(layer, expert);
          wrong += !stored_.is_there(first) + !stored_.is_there(first + 1);
          store.release(user);
        }
        together_.arrive_and_wait();  // as the threads of a forward meet at the end of a layer
      }
    }
    return wrong;
  }

  StoredMatrices stored_{2 * 2 * kExperts};
  std::vector<LayerExperts> layers_;
  mutable std::barrier<> together_{kUsers};
};

TEST_F(Experts, EachUserSeesThoseThatItWantsWhateverRoomThereIs) {
  const ModelFolder folder = stored_.open();
  for (const int64_t slots : {4, 5, 9, 2 * kExperts}) {
    ExpertStore store(folder, layers_, slots, kUsers);
    std::vector<int> wrong(kUsers, -2);
    run_users([&](int user) { wrong[static_cast<size_t>(user)] = use(store, user, 60); });
    EXPECT_EQ(wrong, std::vector<int>(kUsers)) << slots << " slots";
    EXPECT_EQ(store.error(), nullptr);
  }
}

TEST_F(Experts, WhatAllHasRoomIsReadOnce) {
  const ModelFolder folder = stored_.open();
  ExpertStore store(folder, layers_, 2 * kExperts, kUsers);
  run_users([&](int user) { use(store, user, 60); });
  const double all = 2.0 * kExperts * 2 * 2 * kStoredRows * kStoredColumns;
  EXPECT_DOUBLE_EQ(store.reading().bytes, all);
  run_users([&](int user) { use(store, user, 10); });
  EXPECT_DOUBLE_EQ(store.reading().bytes, all);
}

TEST_F(Experts, AFileThatBecameShorterEndsEveryUserAtTheSameExpert) {
  const ModelFolder folder = stored_.open();
  ExpertStore store(folder, layers_, 4, kUsers);
  stored_.cut();
  std::vector<int> wrong(kUsers, -2);
  run_users([&](int user) { wrong[static_cast<size_t>(user)] = use(store, user, 60); });
  EXPECT_EQ(wrong, std::vector<int>(kUsers, -1));
  ASSERT_NE(store.error(), nullptr);
  EXPECT_THROW(std::rethrow_exception(store.error()), ModelError);
}

TEST_F(Experts, EndWhileTheyAreRead) {
  const ModelFolder folder = stored_.open();
  const std::vector<int32_t> all{0, 1, 2, 3, 4, 5, 6, 7, 8};
  for (int i = 0; i < 50; ++i) {
    ExpertStore store(folder, layers_, 9, 1);
    store.want(0, 1, all);
    if (i % 2 == 1) continue;
    ASSERT_TRUE(store.acquire(0, 1, all[static_cast<size_t>(i % 9)]));
  }
}

/// Five parts of layers, of one to three matrices.
class Stream : public testing::Test {
 protected:
  Stream() {
    int matrix = 0;
    for (const int count : {2, 1, 3, 1, 2}) {
      StreamedPart& part = parts_.emplace_back();
      part.layer = parts_.size() / 2;
      part.part = parts_.size() % 2 == 0 ? Part::qkv : Part::down;
      for (int i = 0; i < count; ++i) part.matrices.push_back(stored_.wanted(matrix++));
      part.bytes = memory_bytes(part.matrices);
      part.read_bytes = 2 * kStoredRows * kStoredColumns * count;
    }
  }

  int use(LayerStream& stream, int user, int passes) const {
    int wrong = 0;
    for (int pass = 0; pass < passes; ++pass) {
      int matrix = 0;
      for (const StreamedPart& part : parts_) {
        if (!stream.acquire(user, part.layer, part.part)) return -1;
        for (size_t i = 0; i < part.matrices.size(); ++i) wrong += !stored_.is_there(matrix++);
        stream.release(user);
      }
    }
    return wrong;
  }

  StoredMatrices stored_{9};
  std::vector<StreamedPart> parts_;
};

TEST_F(Stream, EachUserSeesEveryPartOfEveryPass) {
  const ModelFolder folder = stored_.open();
  for (const int slots : {2, 3, 5}) {
    LayerStream stream(folder, parts_, slots, kUsers);
    for (int turn = 0; turn < 3; ++turn) {
      std::vector<int> wrong(kUsers, -2);
      run_users([&](int user) { wrong[static_cast<size_t>(user)] = use(stream, user, 40); });
      EXPECT_EQ(wrong, std::vector<int>(kUsers)) << slots << " slots";
      EXPECT_GE(stream.try_reading(0.001).bytes, 0);  // after which a pass begins at the first part
    }
  }
}

TEST_F(Stream, AFileThatBecameShorterEndsEveryUserAtTheSamePart) {
  const ModelFolder folder = stored_.open();
  LayerStream stream(folder, parts_, 2, kUsers);
  EXPECT_EQ(stream.error(), nullptr);
  stored_.cut();
  std::vector<int> wrong(kUsers, -2);
  run_users([&](int user) { wrong[static_cast<size_t>(user)] = use(stream, user, 40); });
  EXPECT_EQ(wrong, std::vector<int>(kUsers, -1));
  EXPECT_THROW(std::rethrow_exception(stream.error()), ModelError);
  EXPECT_THROW(stream.try_reading(1), ModelError);
}

}  // namespace
}  // namespace overspill::inference
