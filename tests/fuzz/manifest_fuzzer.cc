// libFuzzer over what reads bytes of a checkpoint folder. The mutator keeps the manifest's own checksum
// fitting and, half of the time, changes values of the JSON in place of bytes: else no input would get past
// the first check.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/fuzz/manifest_target.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace overspill::fuzz {
namespace {

using Json = nlohmann::json;
using Random = std::mt19937;

ManifestTarget& target() {
  static ManifestTarget only(
      std::filesystem::is_directory("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path());
  return only;
}

void collect(Json& node, std::vector<Json*>& nodes) {
  nodes.push_back(&node);
  if (!node.is_structured()) return;
  for (Json& child : node) collect(child, nodes);
}

template <typename Values>
auto& one_of(Values& values, Random& random) {
  return values[random() % std::size(values)];
}

Json other_number(const Json& number, Random& random) {
  static constexpr std::array<uint64_t, 12> kEdges = {0,
                                                      1,
                                                      2,
                                                      63,
                                                      64,
                                                      4096,
                                                      65535,
                                                      65536,
                                                      65537,
                                                      uint64_t{1} << 56,
                                                      uint64_t{1} << 62,
                                                      (uint64_t{1} << 63) - 1};
  const auto value = number.is_number_unsigned() ? number.get<uint64_t>() : 0;
  switch (random() % 8) {
    case 0:
      return one_of(kEdges, random);
    case 1:
      return value + 1;
    case 2:
      return value - 1;
    case 3:
      return value * 2;
    case 4:
      return value / 2;
    case 5:
      return -static_cast<int64_t>(random() % 1000);
    case 6:
      return 1.5;
    default:
      return random() % 200'000;
  }
}

Json other_text(const Json& text, Random& random) {
  static const std::vector<std::string> kWords = {
      "hi",           "lo",    "m",          "v",    "grad",          "p",    "adam",         "sgd",
      "exact",        "8bit",  "bf16_split", "fp32", "frozen",        "BF16", "F16",          "F32",
      "F64",          "I64",   "I8",         "BOOL", "F8_E4M3",       "U8",   "slab-a-0.bin", "slab-b-1.bin",
      "resident.bin", "empty", "folder",     "link", "manifest.json", "..",   "../x",         "",
      "__metadata__", "absent"};
  if (random() % 3 != 0 || !text.is_string()) return one_of(kWords, random);
  auto bytes = text.get<std::string>();
  const size_t size = bytes.size();
  bytes.resize(size + 32);
  bytes.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(bytes.data()), size, bytes.size()));
  return bytes;
}

void change(Json& node, const std::vector<Json*>& nodes, Random& random) {
  if (random() % 12 == 0) {  // something from elsewhere
    Json copy = *one_of(nodes, random);
    node = std::move(copy);
  } else if (node.is_number()) {
    node = other_number(node, random);
  } else if (node.is_string()) {
    node = other_text(node, random);
  } else if (node.is_boolean()) {
    node = !node.get<bool>();
  } else if (node.is_array() && !node.empty()) {
    Json& child = node[random() % node.size()];
    switch (random() % 4) {
      case 0:
        node.erase(random() % node.size());
        break;
      case 1: {
        Json copy = child;
        node.push_back(std::move(copy));
        break;
      }
      case 2:
        std::swap(child, node[random() % node.size()]);
        break;
      default:
        if (child.is_number()) {  // of a shape, most likely: the product stays
          const auto factor = static_cast<uint64_t>(2 + random() % 3);
          if (child.is_number_unsigned() && child.get<uint64_t>() % factor == 0) {
            child = child.get<uint64_t>() / factor;
            node.push_back(factor);
          }
        }
    }
  } else if (node.is_object() && !node.empty()) {
    auto field = node.begin();
    std::advance(field, static_cast<int64_t>(random() % node.size()));
    if (random() % 2 == 0) {
      node["strides"] = Json::array({random() % 4, random() % 100});
    } else {
      node.erase(field);
    }
  }
}

/// Gives each piece the checksums of the bytes that it names, where there are such bytes.
void repair_ranges(Json& root) {
  if (!root.is_object() || !root.contains("units") || !root["units"].is_array()) return;
  for (Json& unit : root["units"]) {
    if (!unit.is_object() || !unit.contains("pieces") || !unit["pieces"].is_array()) continue;
    for (Json& piece : unit["pieces"]) {
      if (!piece.is_object()) continue;
      const auto file = piece.find("file"), offset = piece.find("offset"), bytes = piece.find("bytes");
      if (file == piece.end() || offset == piece.end() || bytes == piece.end() || !file->is_string() ||
          !offset->is_number_unsigned() || !bytes->is_number_unsigned())
        continue;
      piece["checksums"] = range_checksums(file->get<std::string>(), *offset, *bytes);
    }
  }
}

std::string changed_values(Json root, Random& random) {
  for (uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
    std::vector<Json*> nodes;
    collect(root, nodes);
    change(*one_of(nodes, random), nodes, random);
  }
  if (random() % 4 != 0) repair_ranges(root);
  return root.dump(-1, ' ', false,
                   random() % 2 == 0 ? Json::error_handler_t::replace : Json::error_handler_t::ignore);
}

}  // namespace
}  // namespace overspill::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  overspill::fuzz::target().run({reinterpret_cast<const char*>(data), size});
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  using namespace overspill::fuzz;
  Random random(seed);
  std::string text(reinterpret_cast<const char*>(data), size);
  const Json root = Json::parse(text, nullptr, false);
  if (random() % 2 == 0 && !root.is_discarded()) {
    text = changed_values(root, random);
  } else {
    text.resize(max_size);
    text.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(text.data()), size, max_size));
  }
  if (random() % 16 != 0) text = sealed(std::move(text));
  if (text.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, text.data(), text.size());
  return text.size();
}
