#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint_builder.h"
#include "engine/checkpoint/manifest_check.h"

namespace overspill::engine {
namespace {

using testing::bytes_of;
using testing::CheckpointBuilder;
using testing::random_values;
using testing::read_file;
using testing::TemporaryFolder;
using testing::write_file;

struct ReadTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string data;
  std::string file;
};

/// A reader of safetensors as strict as the original: no gap, no overlap, nothing behind the last tensor.
void read_safetensors(const std::filesystem::path& path, std::map<std::string, ReadTensor>& tensors) {
  const std::string file = read_file(path);
  ASSERT_GE(file.size(), 8u);
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), 8);
  ASSERT_LE(header_bytes, file.size() - 8);
  ASSERT_EQ(header_bytes % 8, 0u);
  const auto header = nlohmann::json::parse(file.substr(8, header_bytes));
  ASSERT_EQ(header.at("__metadata__").dump(), R"({"format":"pt"})");
  std::map<int64_t, int64_t> ranges;
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    const int64_t begin = tensor.at("data_offsets").at(0), end = tensor.at("data_offsets").at(1);
    ASSERT_LE(end, static_cast<int64_t>(file.size() - 8 - header_bytes));
    if (begin != end) {
      ASSERT_TRUE(ranges.emplace(begin, end).second);
    }
    ASSERT_EQ(tensors.count(name), 0u);
    tensors[name] = {tensor.at("dtype"), tensor.at("shape"),
                     file.substr(8 + header_bytes + begin, end - begin), path.filename()};
  }
  int64_t at = 0;
  for (const auto& [begin, end] : ranges) {
    ASSERT_EQ(begin, at);
    at = end;
  }
  ASSERT_EQ(at, static_cast<int64_t>(file.size() - 8 - header_bytes));
}

/// By way of double and the standard library alone: nearbyint rounds to nearest even in the grid of bf16.
uint16_t to_bf16_slowly(float value) {
  if (std::isnan(value)) return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16 | 0x40);
  if (std::isinf(value) || value == 0) return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  const int exponent = std::max(std::ilogb(value), -126);
  const double rounded =
      std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(value), 7 - exponent)), exponent - 7);
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(rounded)) >> 16);
}

uint32_t bits_of(float value) {
  return std::bit_cast<uint32_t>(value);
}

/// Two split units, one fp32, and frozen ones of four dtypes; expected weights kept as they went in.
class MergeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    CheckpointBuilder builder(checkpoint());
    builder.manifest.units.reserve(8);
    add_split(builder, "embed", 200'000, 70'001);
    CheckpointBuilder::add_segment(builder.manifest.units.back(), "embed.weight", {500, 390}, 0,
                                   {"head.weight"});
    add_split(builder, "block", 30'000, 1'000);
    CheckpointBuilder::add_segment(builder.manifest.units.back(), "block.a", {10, 10}, 16);
    CheckpointBuilder::add_segment(builder.manifest.units.back(), "block.b", {29'000}, 999);
    CheckpointBuilder::add_segment(builder.manifest.units.back(), "block.none", {0, 4}, 29'999);
    CheckpointBuilder::add_segment(builder.manifest.units.back(), "block.scalar", {}, 29'999);

    floats_ = random_values<float>(5'000, 7);
    for (const uint32_t bits :
         {0x3F808000u, 0x3F818000u, 0x3F808001u, 0x7F7FFFFFu, 0x7F800000u, 0xFF800000u, 0x7F800001u,
          0x7FFFFFFFu, 0x80000000u, 0x00000001u, 0x00008000u, 0x00018000u}) {
      floats_.push_back(std::bit_cast<float>(bits));
    }
    add_plain(builder, "norm", "fp32", "F32", bytes_of(floats_), static_cast<int64_t>(floats_.size()));
    add_plain(builder, "ids", "frozen", "I64", bytes_of(random_values<int64_t>(100, 8)), 100);
    add_plain(builder, "mask", "frozen", "BOOL", bytes_of(std::vector<uint8_t>(33, 1)), 33);
    halves_ = {0x0000, 0x8000, 0x3C00, 0xC000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x3555};
    add_plain(builder, "half", "frozen", "F16", bytes_of(halves_), static_cast<int64_t>(halves_.size()));
    add_plain(builder, "bf", "frozen", "BF16", bytes_of(random_values<uint16_t>(50, 9)), 50);
    add_plain(builder, "wide", "frozen", "F64", bytes_of(random_values<double>(3, 10)), 3);
    write_manifest(checkpoint(), builder.manifest);
    manifest_ = builder.manifest;
  }

  void add_split(CheckpointBuilder& builder, const std::string& name, int64_t elements,
                 int64_t piece_elements) {
    masters_[name] = random_values<uint32_t>(elements, static_cast<uint32_t>(elements));
    std::vector<uint16_t> hi, lo;
    for (const uint32_t bits : masters_[name]) {
      hi.push_back(static_cast<uint16_t>((bits + 0x8000u) >> 16));
      lo.push_back(static_cast<uint16_t>(bits & 0xFFFFu));  // the residue modulo 2^16
    }
    ManifestUnit& unit = builder.add_unit(name, "exact", "BF16", elements);
    builder.add_component(unit, "hi", bytes_of(hi), piece_elements);
    builder.add_component(unit, "lo", bytes_of(lo), piece_elements + 13);
    for (const char* component : {"m", "v"})
      builder.add_component(unit, component, std::string(elements * 4, 0), elements);
  }

  void add_plain(CheckpointBuilder& builder, const std::string& name, const std::string& format,
                 const std::string& dtype, const std::string& data, int64_t elements) {
    plain_[name] = data;
    ManifestUnit& unit = builder.add_unit(name, format, dtype, elements);
    builder.add_component(unit, unit.components[0], data, std::max<int64_t>(1, elements / 3));
    CheckpointBuilder::add_segment(unit, name, {elements}, 0);
    if (format == "frozen") return;
    for (const char* component : {"m", "v"})
      builder.add_component(unit, component, std::string(elements * 4, 0), elements);
  }

  std::string master(const std::string& unit, int64_t begin, int64_t count, bool fp32) const {
    std::string bytes;
    for (int64_t i = begin; i < begin + count; ++i) {
      const uint32_t bits = masters_.at(unit)[i];
      const auto hi = static_cast<uint16_t>((bits + 0x8000u) >> 16);
      bytes += fp32 ? std::string(reinterpret_cast<const char*>(&bits), 4)
                    : std::string(reinterpret_cast<const char*>(&hi), 2);
    }
    return bytes;
  }

  std::map<std::string, ReadTensor> merge(const MergeOptions& options, MergeResult* result = nullptr) {
    const MergeResult merged = merge_checkpoint(checkpoint(), out(), options, nullptr, nullptr);
    std::map<std::string, ReadTensor> tensors;
    for (const std::string& file : merged.files) {
      if (file.ends_with(".safetensors")) read_safetensors(out() / file, tensors);
    }
    EXPECT_EQ(merged.tensors, static_cast<int64_t>(tensors.size()));
    if (result != nullptr) *result = merged;
    return tensors;
  }

  std::filesystem::path checkpoint() const { return checkpoint_.path(); }
  std::filesystem::path out() const { return out_.path() / "merged" / "model"; }

  TemporaryFolder checkpoint_, out_;
  Manifest manifest_;
  std::map<std::string, std::vector<uint32_t>> masters_;
  std::map<std::string, std::string> plain_;
  std::vector<float> floats_;
  std::vector<uint16_t> halves_;
};

TEST_F(MergeTest, Bf16IsHiAndNeedsNothingElse) {
  for (const ManifestUnit& unit : manifest_.units) {  // other components may be corrupt: they are not read
    for (const ManifestPiece& piece : unit.pieces) {
      if (piece.component == unit.components[0]) continue;
      std::string bytes = read_file(checkpoint() / piece.range.file);
      bytes[piece.range.offset] ^= 1;
      write_file(checkpoint() / piece.range.file, bytes);
    }
  }
  MergeResult result;
  auto tensors = merge({.dtype = "bf16"}, &result);
  EXPECT_EQ(result.files, std::vector<std::string>{"model.safetensors"});
  EXPECT_EQ(tensors.size(), 11u);
  EXPECT_EQ(tensors["embed.weight"].dtype, "BF16");
  EXPECT_EQ(tensors["embed.weight"].shape, (std::vector<int64_t>{500, 390}));
  EXPECT_EQ(tensors["embed.weight"].data, master("embed", 0, 195'000, false));
  EXPECT_EQ(tensors["block.a"].data, master("block", 16, 100, false));
  EXPECT_EQ(tensors["block.b"].data, master("block", 999, 29'000, false));
  EXPECT_EQ(tensors["block.none"].data, "");
  EXPECT_EQ(tensors["block.none"].shape, (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(tensors["block.scalar"].data, master("block", 29'999, 1, false));
  EXPECT_TRUE(tensors["block.scalar"].shape.empty());
  EXPECT_EQ(tensors.count("head.weight"), 0u);  // tied: Hugging Face ties it again

  std::vector<uint16_t> rounded;
  for (const float value : floats_) rounded.push_back(to_bf16_slowly(value));
  EXPECT_EQ(tensors["norm"].dtype, "BF16");
  EXPECT_EQ(tensors["norm"].data, bytes_of(rounded));
  for (const char* name : {"ids", "mask", "bf", "wide"}) EXPECT_EQ(tensors[name].data, plain_[name]) << name;
  EXPECT_EQ(tensors["ids"].dtype, "I64");
  EXPECT_EQ(tensors["mask"].dtype, "BOOL");
  EXPECT_EQ(tensors["wide"].dtype, "F64");
  EXPECT_EQ(tensors["half"].dtype, "BF16");
}

TEST_F(MergeTest, Fp32IsTheExactMaster) {
  auto tensors = merge({.dtype = "fp32"});
  EXPECT_EQ(tensors["embed.weight"].dtype, "F32");
  EXPECT_EQ(tensors["embed.weight"].data, master("embed", 0, 195'000, true));
  EXPECT_EQ(tensors["block.b"].data, master("block", 999, 29'000, true));
  EXPECT_EQ(tensors["norm"].data, plain_["norm"]);
  EXPECT_EQ(tensors["ids"].data, plain_["ids"]);
  std::string widened;
  for (size_t i = 0; i < 50; ++i) widened += std::string(2, '\0') + plain_["bf"].substr(2 * i, 2);
  EXPECT_EQ(tensors["bf"].data, widened);
  const std::vector<float> halves = {0.0f,     -0.0f,    1.0f,     -2.0f,     0x1p-24f,   1023 * 0x1p-24f,
                                     0x1p-14f, 65504.0f, INFINITY, -INFINITY, 0x1.554p-2f};
  EXPECT_EQ(tensors["half"].data, bytes_of(halves));
  EXPECT_EQ(bits_of(halves[4]), 0x33800000u);
}

TEST_F(MergeTest, ShardsHaveAnIndex) {
  MergeResult result;
  auto tensors = merge({.dtype = "bf16", .shard_bytes = 60'000}, &result);
  ASSERT_EQ(tensors.size(), 11u);
  EXPECT_EQ(tensors["block.b"].data, master("block", 999, 29'000, false));
  const auto index = nlohmann::json::parse(read_file(out() / "model.safetensors.index.json"));
  int64_t total = 0;
  std::map<std::string, int64_t> of_file;
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(index.at("weight_map").at(name), tensor.file);
    total += static_cast<int64_t>(tensor.data.size());
    of_file[tensor.file] += static_cast<int64_t>(tensor.data.size());
  }
  EXPECT_EQ(index.at("weight_map").size(), tensors.size());
  EXPECT_EQ(index.at("metadata").at("total_size"), total);
  EXPECT_EQ(result.bytes, total);
  EXPECT_EQ(result.files.size(), of_file.size() + 1);
  EXPECT_EQ(of_file.size(), 3u);
  EXPECT_EQ(of_file.begin()->first, "model-00001-of-00003.safetensors");
  for (const auto& [file, bytes] : of_file) EXPECT_TRUE(bytes <= 60'000 || bytes == 390'000) << file;
}

TEST_F(MergeTest, EveryTensorIsAligned) {
  for (const char* dtype : {"bf16", "fp32"}) {
    merge({.dtype = dtype});
    const std::string file = read_file(out() / "model.safetensors");
    uint64_t header_bytes;
    std::memcpy(&header_bytes, file.data(), 8);
    const auto header = nlohmann::json::parse(file.substr(8, header_bytes));
    for (const auto& [name, tensor] : header.items()) {
      if (name == "__metadata__") continue;
      const std::string type = tensor.at("dtype");
      const int64_t align = type == "I64" || type == "F64" ? 8 : type == "F32" ? 4 : type == "BF16" ? 2 : 1;
      EXPECT_EQ(tensor.at("data_offsets").at(0).get<int64_t>() % align, 0) << name;
    }
    std::filesystem::remove_all(out());
  }
}

/// By the definition of strides, element by element.
std::string row_major(const std::string& memory, const ManifestSegment& segment) {
  const size_t width = memory.size() / segment.elements;
  std::string out;
  out.reserve(memory.size());
  for (int64_t i = 0; i < segment.elements; ++i) {
    int64_t rest = i, place = 0;
    for (size_t d = segment.shape.size(); d-- > 0; rest /= segment.shape[d]) {
      place += rest % segment.shape[d] * segment.strides[d];
    }
    out.append(memory, place * width, width);
  }
  return out;
}

TEST_F(MergeTest, WritesRowMajorWhateverTheStrides) {
  TemporaryFolder folder;
  CheckpointBuilder builder(folder.path());
  constexpr int64_t kElements = 1'200'000;
  const std::vector<std::pair<std::string, std::string>> kinds = {{"exact", "BF16"},  {"fp32", "F32"},
                                                                  {"frozen", "F16"},  {"frozen", "BF16"},
                                                                  {"frozen", "BOOL"}, {"frozen", "F64"}};
  for (const auto& [format, dtype] : kinds) {
    const std::string name = std::string(format).append(".").append(dtype);
    ManifestUnit& unit = builder.add_unit(name, format, dtype, kElements);
    const auto add = [&](const char* what, std::vector<int64_t> shape, std::vector<int64_t> strides,
                         int64_t begin) {
      CheckpointBuilder::add_segment(unit, name + "." + what, std::move(shape), begin);
      unit.segments.back().strides = std::move(strides);
    };
    add("conv", {4, 3, 5, 7}, {105, 1, 21, 3}, 64);
    add("turned", {3, 1, 4, 5}, {4, 1, 1, 12}, 500);
    add("huge", {1'100, 1'025}, {1, 1'100}, 640);  // more than is read at a time
    add("flat", {33}, {}, 1'199'000);
    for (const std::string& component : unit.components) {
      const int64_t bytes = component_element_bytes(unit, component) * kElements;
      builder.add_component(unit, component, bytes_of(random_values<uint64_t>(bytes / 8, 1)), 700'001);
    }
  }
  const Manifest& strided = builder.manifest;
  Manifest plain = strided;  // the same bytes, taken as row-major
  for (ManifestUnit& unit : plain.units) {
    for (ManifestSegment& segment : unit.segments) segment.strides.clear();
  }
  for (const char* dtype : {"bf16", "fp32"}) {
    std::map<std::string, ReadTensor> expected, tensors;
    write_manifest(folder.path(), plain);
    merge_checkpoint(folder.path(), out() / "plain", {.dtype = dtype}, nullptr, nullptr);
    read_safetensors(out() / "plain/model.safetensors", expected);
    write_manifest(folder.path(), strided);
    const MergeResult result =
        merge_checkpoint(folder.path(), out() / "strided", {.dtype = dtype}, nullptr, nullptr);
    read_safetensors(out() / "strided/model.safetensors", tensors);
    EXPECT_EQ(result.tensors, static_cast<int64_t>(kinds.size() * 4));
    for (const ManifestUnit& unit : strided.units) {
      for (const ManifestSegment& segment : unit.segments) {
        const ReadTensor &found = tensors[segment.name], &memory = expected[segment.name];
        EXPECT_EQ(found.shape, segment.shape);
        EXPECT_EQ(found.dtype, memory.dtype);
        const bool same = segment.strides.empty() ? found.data == memory.data
                                                  : found.data == row_major(memory.data, segment);
        EXPECT_TRUE(same) << segment.name << " to " << dtype;
        EXPECT_EQ(found.data == memory.data, segment.strides.empty());
      }
    }
    std::filesystem::remove_all(out());
  }
}

TEST_F(MergeTest, LeavesNothingAfterAnError) {
  const FileRange& range = manifest_.units[1].pieces[0].range;
  std::string bytes = read_file(checkpoint() / range.file);
  for (const ManifestPiece& piece : manifest_.units[1].pieces) {
    if (piece.component == "hi" && piece.range.file == range.file) bytes[piece.range.offset] ^= 1;
  }
  write_file(checkpoint() / range.file, bytes);
  EXPECT_THROW(merge_checkpoint(checkpoint(), out(), {.shard_bytes = 60'000}, nullptr, nullptr),
               CheckpointError);
  EXPECT_FALSE(std::filesystem::exists(out()));
  std::filesystem::create_directories(out());  // a folder that was there stays
  EXPECT_THROW(merge_checkpoint(checkpoint(), out(), {}, nullptr, nullptr), CheckpointError);
  EXPECT_TRUE(std::filesystem::is_empty(out()));
}

TEST_F(MergeTest, RefusesWhatItCannotDo) {
  EXPECT_THROW(merge_checkpoint(checkpoint(), out(), {.dtype = "fp16"}, nullptr, nullptr), CheckpointError);
  EXPECT_THROW(merge_checkpoint(checkpoint(), out(), {.shard_bytes = 0}, nullptr, nullptr), CheckpointError);
  EXPECT_THROW(merge_checkpoint(out_.path(), out(), {}, nullptr, nullptr), CheckpointError);
  EXPECT_FALSE(std::filesystem::exists(out()));
  std::filesystem::create_directories(out());
  write_file(out() / "precious", "mine");
  EXPECT_THROW(merge_checkpoint(checkpoint(), out(), {}, nullptr, nullptr), CheckpointError);
  EXPECT_EQ(read_file(out() / "precious"), "mine");
}

TEST_F(MergeTest, ReportsProgressAndMayBeStopped) {
  struct Seen {
    int64_t done = 0, total = 0;
  } seen;
  const auto record = [](void* context, int64_t done, int64_t total) {
    auto& last = *static_cast<Seen*>(context);
    EXPECT_GT(done, last.done);
    last = {done, total};
  };
  const MergeResult result = merge_checkpoint(checkpoint(), out(), {}, record, &seen);
  EXPECT_EQ(seen.done, result.bytes);
  EXPECT_EQ(seen.total, result.bytes);
  std::filesystem::remove_all(out());
  const auto stop = [](void*, int64_t, int64_t) { throw std::runtime_error("interrupted"); };
  EXPECT_THROW(merge_checkpoint(checkpoint(), out(), {}, stop, nullptr), std::runtime_error);
  EXPECT_FALSE(std::filesystem::exists(out()));
}

TEST_F(MergeTest, WritesTensorsThatWereGivenByteForByte) {
  const auto mean = random_values<float>(7, 1);
  const auto count = random_values<int64_t>(1, 2);
  const MergeOptions options{.shard_bytes = 60'000,
                             .tensors = {{"bn.mean", "F32", {7}, std::as_bytes(std::span(mean))},
                                         {"bn.count", "I64", {}, std::as_bytes(std::span(count))},
                                         {"none", "BF16", {0, 4}, {}}}};
  MergeResult result;
  const auto tensors = merge(options, &result);
  EXPECT_EQ(tensors.at("bn.mean").data, bytes_of(mean));
  EXPECT_EQ(tensors.at("bn.mean").dtype, "F32");  // whatever the weights are merged to
  EXPECT_EQ(tensors.at("bn.count").data, bytes_of(count));
  EXPECT_TRUE(tensors.at("bn.count").shape.empty());
  EXPECT_EQ(tensors.at("none").shape, (std::vector<int64_t>{0, 4}));
  const auto index = nlohmann::json::parse(read_file(out() / "model.safetensors.index.json"));
  for (const char* name : {"bn.mean", "bn.count", "none", "embed.weight"})
    EXPECT_EQ(index.at("weight_map").at(name), tensors.at(name).file);
}

TEST_F(MergeTest, RefusesGivenTensorsThatDoNotFit) {
  const std::vector<std::byte> eight(8);
  const std::vector<MergeTensor> wrong = {{"a", "F32", {3}, eight},
                                          {"a", "F32", {}, eight},
                                          {"a", "F99", {2}, eight},
                                          {"a", "F32", {-2}, eight},
                                          {"a", "F32", {0}, eight},
                                          {"a", "F32", {1, 1, 1, 3}, eight},
                                          {"a", "F99", {0}, {}},
                                          {"a", "F32", {2}, {}},
                                          {"embed.weight", "F32", {2}, eight},
                                          {"a", "U8", {1LL << 62, 1LL << 62}, eight},
                                          {"__metadata__", "F32", {2}, eight}};
  for (const MergeTensor& tensor : wrong) {
    EXPECT_THROW(merge_checkpoint(checkpoint(), out(), {.tensors = {tensor}}, nullptr, nullptr),
                 CheckpointError)
        << tensor.name << " " << tensor.dtype;
    EXPECT_FALSE(std::filesystem::exists(out()));
  }
}

TEST_F(MergeTest, RemovesNothingWhereThereIsMoreThanItsOwnLeftovers) {
  std::filesystem::create_directories(out());
  write_file(out() / "model.safetensors.tmp", "left by a merge that was killed");
  write_file(out() / "precious", "mine");
  EXPECT_THROW(merge_checkpoint(checkpoint(), out(), {}, nullptr, nullptr), CheckpointError);
  EXPECT_TRUE(std::filesystem::exists(out() / "model.safetensors.tmp"));
  std::filesystem::remove(out() / "precious");
  EXPECT_GT(merge_checkpoint(checkpoint(), out(), {}, nullptr, nullptr).tensors, 0);
}

}  // namespace
}  // namespace overspill::engine
