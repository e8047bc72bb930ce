// Optimizer states out of a checkpoint, whose pieces and tensors begin where they like.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "checkpoint_builder.h"
#include "cpu_optim/update.h"
#include "engine/checkpoint/parameters.h"
#include "engine/checkpoint/states.h"
#include "engine/checkpoint/weights.h"
#include "engine/partition/model.h"

namespace overspill::engine {
namespace {

using testing::bytes_of;
using testing::CheckpointBuilder;
using testing::random_values;
using testing::TemporaryFolder;

constexpr int64_t kUnitElements = 1000;
constexpr int64_t kPieceElements = 128;

/// A unit in one format, with a parameter that begins inside a block, and what its states are.
class CheckpointStatesTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    CheckpointBuilder builder(folder_.path());
    ManifestUnit& unit = builder.add_unit("unit", GetParam(), dtype(), kUnitElements);
    CheckpointBuilder::add_segment(unit, "before", {70}, 0);
    CheckpointBuilder::add_segment(unit, "weight", {9, 91}, 70);
    uint32_t seed = 1;
    for (const auto& spec : optim::components(adam(), format())) {
      const std::string component(spec.name);
      for (int64_t begin = 0; begin < kUnitElements; begin += kPieceElements) {
        const int64_t elements = std::min(kPieceElements, kUnitElements - begin);
        const auto bytes = random_values<std::byte>(spec.bytes(elements), seed++);
        builder.add_piece(unit, component, begin, elements, bytes_of(bytes));
        if (spec.role == optim::Role::state) decode(spec, begin, elements, bytes);
      }
    }
    write_manifest(folder_.path(), builder.manifest);
  }

  static optim::Optimizer adam() { return optim::optimizer_named("adam"); }
  static std::string dtype() {
    return format() == optim::Format::fp32 ? "F32" : format() == optim::Format::fp16 ? "F16" : "BF16";
  }
  static optim::Format format() { return optim::format_named(GetParam()); }

  /// A whole piece at once, as an engine holds it.
  void decode(const optim::ComponentSpec& spec, int64_t begin, int64_t elements,
              std::vector<std::byte> bytes) {
    std::array<std::byte*, optim::kComponentsMax> components;
    components.fill(bytes.data());
    auto& values = expected_[spec.state];
    values.resize(kUnitElements);
    optim::load_state(adam(), format(),
                      {std::span(components).first(optim::components(adam(), format()).size()), elements},
                      {0, elements}, spec.state, std::span(values).subspan(begin, elements));
  }

  bool same(std::span<const float> found, int state, int64_t begin) const {
    return std::ranges::equal(std::as_bytes(found),
                              std::as_bytes(std::span(expected_[state]).subspan(begin, found.size())));
  }

  TemporaryFolder folder_;
  std::array<std::vector<float>, 2> expected_;
};

TEST_P(CheckpointStatesTest, EveryRunOfElementsIsThatOfTheWholePiece) {
  const Manifest manifest = read_manifest(folder_.path());
  const CheckpointReader files(folder_.path());
  StateReader m(files, manifest.units[0], "m"), v(files, manifest.units[0], "v");
  for (const int64_t begin : {0, 1, 63, 64, 70, 127, 128, 129, 900}) {
    for (const int64_t count : {0, 1, 57, 58, 64, 100}) {
      std::vector<float> values(count);
      m.read(begin, values);
      EXPECT_TRUE(same(values, 0, begin)) << begin << " + " << count;
      v.read(begin, values);
      EXPECT_TRUE(same(values, 1, begin)) << begin << " + " << count;
    }
  }
}

TEST_P(CheckpointStatesTest, AParameterIsReadByItsName) {
  const CheckpointParameters parameters(folder_.path());
  std::vector<float> values(9 * 91);
  parameters.read_state("weight", "v", values);
  EXPECT_TRUE(same(values, 1, 70));
  EXPECT_THROW(parameters.read_state("weight", "hi", values), CheckpointError);
  EXPECT_THROW(parameters.read_state("other", "v", values), CheckpointError);
  EXPECT_THROW(parameters.read_state("before", "v", values), std::invalid_argument);
  EXPECT_THROW(parameters.read_weight("before", "F32", std::as_writable_bytes(std::span(values))),
               std::invalid_argument);
}

TEST_P(CheckpointStatesTest, AWeightIsReadAsWhatItIsOrAPlainFloat) {
  const CheckpointParameters parameters(folder_.path());
  std::vector<std::byte> bytes(9 * 91 * 8);
  for (const std::string other : {"BF16", "F16", "F32", "F64", "I16", "I32", "?"}) {
    const auto read = [&] {
      parameters.read_weight("weight", other, std::span(bytes).first(9 * 91 * dtype_bytes(other)));
    };
    if (other == "BF16" || other == "F32" || other == dtype()) {
      EXPECT_NO_THROW(read()) << other;
    } else {
      EXPECT_THROW(read(), std::invalid_argument) << other;
    }
  }
}

TEST_P(CheckpointStatesTest, AParameterInAnotherOrderIsReadRowMajor) {
  Manifest manifest = read_manifest(folder_.path());
  manifest.units[0].segments[1].strides = {1, 9};
  std::filesystem::remove(folder_.path() / kManifestFile);
  write_manifest(folder_.path(), manifest);
  const CheckpointParameters parameters(folder_.path());
  std::vector<float> values(9 * 91);
  parameters.read_state("weight", "m", values);
  std::vector<std::byte> own(9 * 91 * dtype_bytes(dtype())), flat(own.size());
  parameters.read_weight("weight", dtype(), own);
  const CheckpointReader files(folder_.path());
  WeightReader reader(files, manifest.units[0]);
  std::ranges::copy(reader.read(70, 9 * 91, dtype()), flat.begin());
  const auto size = static_cast<size_t>(dtype_bytes(dtype()));
  for (int64_t row = 0; row < 9; ++row) {
    for (int64_t column = 0; column < 91; ++column) {
      const auto there = static_cast<size_t>(column * 9 + row), here = static_cast<size_t>(row * 91 + column);
      EXPECT_TRUE(same(std::span(values).subspan(here, 1), 0, 70 + static_cast<int64_t>(there)));
      EXPECT_EQ(std::memcmp(own.data() + here * size, flat.data() + there * size, size), 0);
    }
  }
}

TEST_P(CheckpointStatesTest, ADamagedScaleIsFound) {
  const CheckpointParameters parameters(folder_.path());
  const ManifestPiece* last = nullptr;
  for (const ManifestPiece& piece : parameters.manifest().units[0].pieces) {
    if (piece.component == "v" && piece.begin == 0) last = &piece;
  }
  ASSERT_NE(last, nullptr);
  std::string file = testing::read_file(folder_.path() / last->range.file);
  file[static_cast<size_t>(last->range.offset + last->range.bytes - 1)] ^= 1;
  testing::write_file(folder_.path() / last->range.file, file);
  std::vector<float> values(9 * 91);
  EXPECT_THROW(parameters.read_state("weight", "v", values), CheckpointError);
}

INSTANTIATE_TEST_SUITE_P(Formats, CheckpointStatesTest,
                         ::testing::Values("fp32", "exact", "fp16", "compact", "8bit"),
                         [](const auto& info) { return std::string("as_") + info.param; });

}  // namespace
}  // namespace overspill::engine
