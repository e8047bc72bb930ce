// Merges of tensors that one thread alone does not write at once.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string_view>

#include "../watched.h"
#include "checkpoint_builder.h"
#include "engine/checkpoint/checkpoint_reader.h"

namespace overspill::engine {
namespace {

using testing::bytes_of;
using testing::CheckpointBuilder;
using testing::random_values;
using testing::read_file;
using testing::TemporaryFolder;
using testing::write_file;

constexpr int64_t kRows = 1'100, kColumns = 1'025, kMatrix = kRows * kColumns;

/// One frozen unit of F64: two matrices that lie in the order of their columns, one in that of its rows, and
/// a short vector; 27 MB.
class LargeMergeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    CheckpointBuilder builder(checkpoint());
    constexpr int64_t kElements = 3 * kMatrix + 33;
    data_ = bytes_of(random_values<uint64_t>(kElements, 5));
    ManifestUnit& unit = builder.add_unit("unit", "frozen", "F64", kElements);
    builder.add_component(unit, "hi", data_, kElements);
    for (const char* name : {"first turned", "second turned", "plain"}) {
      const bool turned = std::string_view(name).ends_with("turned");
      CheckpointBuilder::add_segment(unit, name, {kRows, kColumns}, std::ssize(unit.segments) * kMatrix);
      if (turned) unit.segments.back().strides = {1, kRows};
    }
    CheckpointBuilder::add_segment(unit, "short", {33}, 3 * kMatrix);
    write_manifest(checkpoint(), builder.manifest);
    range_ = unit.pieces[0].range;
  }

  MergeResult merge() { return merge_checkpoint(checkpoint(), out(), {}, nullptr, nullptr); }

  /// Of segment `index`, row-major.
  std::string expected(int64_t index) const {
    const std::string_view memory = std::string_view(data_).substr(index * kMatrix * 8, kMatrix * 8);
    if (index == 2) return std::string(memory);
    std::string rows;
    rows.reserve(memory.size());
    for (int64_t i = 0; i < kMatrix; ++i)
      rows.append(memory.substr((i % kColumns * kRows + i / kColumns) * 8, 8));
    return rows;
  }

  void flip_byte(int64_t in_unit) const {
    const std::filesystem::path path = checkpoint() / range_.file;
    std::string bytes = read_file(path);
    bytes[range_.offset + in_unit] ^= 1;
    write_file(path, bytes);
  }

  std::filesystem::path checkpoint() const { return checkpoint_.path(); }
  std::filesystem::path out() const { return out_.path() / "model"; }

  TemporaryFolder checkpoint_, out_;
  std::string data_;
  FileRange range_;
};

TEST_F(LargeMergeTest, EveryByteIsInItsPlace) {
  EXPECT_EQ(merge().bytes, std::ssize(data_));
  const std::string file = read_file(out() / "model.safetensors");
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), 8);
  const std::string_view tensors = std::string_view(file).substr(8 + header_bytes);
  ASSERT_EQ(tensors.size(), data_.size());
  for (int64_t i = 0; i < 3; ++i)
    EXPECT_TRUE(tensors.substr(i * kMatrix * 8, kMatrix * 8) == expected(i)) << i;
  EXPECT_EQ(tensors.substr(3 * kMatrix * 8), data_.substr(3 * kMatrix * 8));
}

TEST_F(LargeMergeTest, OfTwoDamagedBlocksTheFirstIsNamed) {
  constexpr int64_t kSums = 64 * 1024;
  const int64_t first = (int64_t{21} << 20) / kSums, second = (int64_t{25} << 20) / kSums;
  flip_byte(second * kSums + 7);
  flip_byte(first * kSums + 7);
  try {
    merge();
    FAIL() << "damaged bytes were merged";
  } catch (const CheckpointError& error) {
    const std::string where = (checkpoint() / range_.file).string() + ": 65536 bytes at " +
                              std::to_string(range_.offset + first * kSums) + " are corrupt";
    EXPECT_NE(std::string_view(error.what()).find(where), std::string_view::npos) << error.what();
  }
  EXPECT_FALSE(std::filesystem::exists(out()));
}

TEST_F(LargeMergeTest, AFileThatEndsTooEarlyIsNamed) {
  std::filesystem::resize_file(checkpoint() / range_.file, range_.offset + 20'000'000);
  const CheckpointReader files(checkpoint());
  io::PageBuffer buffer;
  EXPECT_NO_THROW(files.read(range_, 19'000'000, 10, buffer));
  try {
    files.read(range_, 20'000'000 - 10, 20, buffer);
    FAIL() << "bytes that are not there were read";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string_view(error.what()).find("too early"), std::string_view::npos) << error.what();
  }
}

/// Bytes of this process that are, or were at most since `forget_peak`, in memory.
int64_t peak_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kib = 0;
    if (word == "VmHWM:" && status >> kib) return kib * 1024;
  }
  throw std::runtime_error("/proc/self/status has no VmHWM");
}

void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

TEST(MergeMemory, IsFarLessThanATensor) {
  constexpr int64_t kElements = int64_t{kWatched ? 16 : 128} << 20;
  const TemporaryFolder checkpoint, out;
  CheckpointBuilder builder(checkpoint.path());
  ManifestUnit& unit = builder.add_unit("unit", "frozen", "BF16", kElements);
  CheckpointBuilder::add_segment(unit, "zeros", {kElements}, 0);
  std::ofstream(checkpoint.path() / "zeros.slab").close();
  std::filesystem::resize_file(checkpoint.path() / "zeros.slab", kElements * 2);  // all of it a hole
  const std::string block(65536, '\0');
  const uint64_t sum = XXH3_64bits(block.data(), block.size());
  unit.pieces.push_back({.component = "hi",
                         .begin = 0,
                         .elements = kElements,
                         .range = {"zeros.slab", 0, kElements * 2, std::vector(kElements / 32768, sum)}});
  write_manifest(checkpoint.path(), builder.manifest);
  forget_peak();
  const int64_t before = peak_bytes();
  const MergeResult result =
      merge_checkpoint(checkpoint.path(), out.path() / "model", {.dtype = "bf16"}, nullptr, nullptr);
  EXPECT_EQ(result.bytes, kElements * 2);
  if (!kWatched) {
    // Sixteen threads, each with 2 MiB that it reads and 2 MiB that it writes. A sanitizer takes more itself.
    EXPECT_LT(peak_bytes() - before, int64_t{96} << 20);
  }
}

}  // namespace
}  // namespace overspill::engine
