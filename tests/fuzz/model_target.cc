#include "tests/fuzz/model_target.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "inference/error.h"
#include "inference/format/safetensors.h"
#include "inference/model/families.h"

namespace overspill::fuzz {
namespace {

namespace fs = std::filesystem;
using inference::ModelError;
using inference::StoredTensor;

constexpr int kTensors = 40;  // of the folder: what layers and experts are bounded by
/// The bytes of its first tensor: what the heads of all layers are bounded by.
constexpr int64_t kNumbers = 1 << 14;

void promise(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

void write_file(const fs::path& path, std::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

bool run_header(std::string_view text, int64_t data_bytes) {
  const int64_t begin = inference::kHeaderLengthBytes + static_cast<int64_t>(text.size());
  std::vector<StoredTensor> tensors;
  try {
    tensors = inference::parse_header(text, begin + data_bytes, "model.safetensors");
  } catch (const ModelError& error) {
    promise(std::string_view(error.what()).starts_with("model.safetensors: "), "an error names the file");
    return false;
  }
  int64_t end = begin;
  std::set<std::string> names;
  for (const StoredTensor& tensor : tensors) {
    promise(tensor.offset == end && tensor.bytes >= 0, "tensors tile the file");
    end += tensor.bytes;
    promise(end <= begin + data_bytes, "a tensor lies in the file");
    promise(tensor.bytes == 0 || tensor.elements() <= tensor.bytes * 2,
            "a shape is no larger than its bytes");
    promise(names.insert(tensor.name).second, "a name is there once");
  }
  promise(end == begin + data_bytes, "every byte belongs to a tensor");
  return true;
}

}  // namespace

ModelTarget::ModelTarget(const fs::path& parent) {
  std::string name = (parent / "test-of-overspill-fuzz-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no scratch folder in " + parent.string());
  folder_ = name;
  nlohmann::json header = nlohmann::json::object();
  for (int i = 0; i < kTensors; ++i)
    header[fmt::format("t{}", i)] = {{"dtype", "U8"}, {"shape", {0}}, {"data_offsets", {kNumbers, kNumbers}}};
  header["t0"] = {{"dtype", "U8"}, {"shape", {kNumbers}}, {"data_offsets", {0, kNumbers}}};
  const std::string text = header.dump();
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(text.size() >> (8 * i) & 0xFF);
  write_file(folder_ / "model.safetensors", file + text + std::string(kNumbers, '\0'));
}

ModelTarget::~ModelTarget() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

bool ModelTarget::run(std::string_view input) {
  const size_t line = input.find('\n');
  if (line == std::string_view::npos) return false;
  const std::string_view kind = input.substr(0, line), text = input.substr(line + 1);
  if (kind == "config") return run_config(text);
  uint32_t data_bytes = 0;
  std::from_chars(kind.data(), kind.data() + kind.size(), data_bytes);
  return run_header(text, data_bytes);
}

bool ModelTarget::run_config(std::string_view text) {
  write_file(folder_ / "config.json", text);
  inference::ModelSpec spec;
  try {
    spec = inference::describe(inference::ModelFolder(folder_));
  } catch (const ModelError& error) {
    promise(std::string_view(error.what()).find(folder_.string()) != std::string_view::npos,
            "an error names the folder");
    return false;
  }
  promise(spec.layers.size() <= kTensors, "layers are at most the files' tensors");
  size_t experts = 0;
  int64_t frequencies = 0;
  for (const inference::Layer& layer : spec.layers) {
    const inference::Attention& attention = layer.attention;
    promise(attention.heads > 0 && attention.kv_heads > 0 && attention.heads % attention.kv_heads == 0,
            "key heads divide the heads");
    frequencies += attention.rope ? static_cast<int64_t>(attention.rope->frequencies.size()) : 0;
    promise(!attention.rope ||
                2 * static_cast<int64_t>(attention.rope->frequencies.size()) <= attention.head_size,
            "a rotation stays in its head");
    if (const auto* mixture = std::get_if<inference::Mixture>(&layer.feed_forward)) {
      experts += mixture->experts.size();
      promise(mixture->chosen >= 1 && std::cmp_less_equal(mixture->chosen, mixture->experts.size()),
              "as many experts are chosen as there are, at most");
    }
  }
  promise(frequencies <= kNumbers, "rotary frequencies are at most the files' bytes");
  promise(experts <= kTensors, "experts are at most the files' tensors");
  return true;
}

}  // namespace overspill::fuzz
