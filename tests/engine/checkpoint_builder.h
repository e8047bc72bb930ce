// Checkpoints made by hand, sharing nothing with the engine but the structs of manifest.h.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "engine/checkpoint/manifest.h"

namespace overspill::engine::testing {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = ::testing::TempDir() + "test-of-overspill-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::remove(path);  // ext4 syncs a file that is truncated and written again, but not a new one
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// The text of a manifest that was changed, its own checksum made to fit again where it has one.
inline std::string sealed(std::string text) {
  const std::string before = R"({"checksum":")";
  if (!text.starts_with(before) || text.size() < before.size() + 16) return text;
  text.replace(before.size(), 16, 16, '0');
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(text.data(), text.size())));
  return text.replace(before.size(), 16, digits);
}

inline std::string hex(uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
  return digits;
}

/// The text of version 3, which has the pieces and their checksums in it.
inline std::string version_3(const Manifest& manifest) {
  using Json = nlohmann::json;
  Json units = Json::array();
  for (const ManifestUnit& unit : manifest.units) {
    Json parameters = Json::array(), pieces = Json::array();
    for (const ManifestSegment& segment : unit.segments) {
      parameters.push_back({{"name", segment.name},
                            {"aliases", segment.aliases},
                            {"shape", segment.shape},
                            {"begin", segment.begin},
                            {"elements", segment.elements},
                            {"step", segment.step},
                            {"group", segment.group},
                            {"trainable", segment.trainable}});
      if (!segment.strides.empty()) parameters.back()["strides"] = segment.strides;
    }
    for (const ManifestPiece& piece : unit.pieces) {
      std::string sums;
      for (const uint64_t sum : piece.range.block_checksums) sums += hex(sum);
      pieces.push_back({{"component", piece.component},
                        {"begin", piece.begin},
                        {"elements", piece.elements},
                        {"file", piece.range.file},
                        {"offset", piece.range.offset},
                        {"bytes", piece.range.bytes},
                        {"checksums", sums}});
    }
    units.push_back({{"name", unit.name},
                     {"optimizer", unit.optimizer},
                     {"format", unit.format},
                     {"components", unit.components},
                     {"dtype", unit.dtype},
                     {"elements", unit.elements},
                     {"parameters", std::move(parameters)},
                     {"pieces", std::move(pieces)}});
  }
  return sealed(Json{{"checksum", "0000000000000000"},
                     {"version", 3},
                     {"step", manifest.step},
                     {"skipped_steps", manifest.skipped_steps},
                     {"world", manifest.world},
                     {"units", std::move(units)},
                     {"extra", manifest.extra_json}}
                    .dump());
}

template <typename Value>
std::string bytes_of(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

/// Any bit patterns, not only tame numbers.
template <typename Value>
std::vector<Value> random_values(int64_t count, uint32_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Value> values(count);
  for (Value& value : values) {
    const uint64_t bits = random();
    std::memcpy(&value, &bits, sizeof value);
  }
  return values;
}

/// Writes components into data files of a folder, cut into pieces that respect neither tensors nor blocks.
class CheckpointBuilder {
 public:
  explicit CheckpointBuilder(std::filesystem::path folder) : folder_(std::move(folder)) {}

  Manifest manifest;

  ManifestUnit& add_unit(const std::string& name, const std::string& format, const std::string& dtype,
                         int64_t elements) {
    ManifestUnit unit;
    unit.name = name;
    unit.optimizer = format == "frozen" ? "" : "adam";
    unit.format = format;
    unit.components = {format == "fp32" ? "p" : format == "fp16" ? "p16" : "hi"};
    if (format == "fp16") unit.components.emplace_back("master");
    if (format == "exact" || format == "compact" || format == "8bit") unit.components.emplace_back("lo");
    if (format != "frozen") unit.components.insert(unit.components.end(), {"m", "v"});
    unit.dtype = dtype;
    unit.elements = elements;
    manifest.units.push_back(unit);
    return manifest.units.back();
  }

  static void add_segment(ManifestUnit& unit, const std::string& name, std::vector<int64_t> shape,
                          int64_t begin, std::vector<std::string> aliases = {}) {
    ManifestSegment segment;
    segment.name = name;
    segment.aliases = std::move(aliases);
    segment.elements = 1;
    for (const int64_t extent : shape) segment.elements *= extent;
    segment.shape = std::move(shape);
    segment.begin = begin;
    segment.step = 3;
    segment.trainable = unit.format != "frozen";
    unit.segments.push_back(segment);
  }

  /// The whole component, `data` being its elements' bytes, in pieces of about `piece_elements`.
  void add_component(ManifestUnit& unit, const std::string& component, const std::string& data,
                     int64_t piece_elements) {
    const int64_t element_bytes = static_cast<int64_t>(data.size()) / unit.elements;
    for (int64_t begin = 0; begin < unit.elements; begin += piece_elements) {
      const int64_t elements = std::min(piece_elements, unit.elements - begin);
      std::string bytes = data.substr(begin * element_bytes, elements * element_bytes);
      bytes.append((pieces_ + 1) % 3 * 100, '#');  // padding inside the range
      add_piece(unit, component, begin, elements, bytes);
    }
    // Their order in the manifest says nothing.
    std::ranges::reverse(unit.pieces);
  }

  /// One piece of it.
  void add_piece(ManifestUnit& unit, const std::string& component, int64_t begin, int64_t elements,
                 const std::string& bytes) {
    ++pieces_;
    ManifestPiece piece;
    piece.component = component;
    piece.begin = begin;
    piece.elements = elements;
    piece.range = append(pieces_ % 2 == 0 ? "data-0.slab" : "data-1.slab", bytes);
    unit.pieces.push_back(piece);
  }

 private:
  FileRange append(const std::string& name, const std::string& bytes) {
    std::string content = read_file(folder_ / name);
    content.append(pieces_ % 5 * 7, '-');  // somebody else's bytes
    FileRange range;
    range.file = name;
    range.offset = static_cast<int64_t>(content.size());
    range.bytes = static_cast<int64_t>(bytes.size());
    for (size_t at = 0; at < bytes.size(); at += 65536) {
      range.block_checksums.push_back(
          XXH3_64bits(bytes.data() + at, std::min<size_t>(65536, bytes.size() - at)));
    }
    write_file(folder_ / name, content + bytes);
    return range;
  }

  std::filesystem::path folder_;
  int64_t pieces_ = 0;
};

}  // namespace overspill::engine::testing
