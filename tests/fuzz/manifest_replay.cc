// Runs every file of the corpus through the fuzzer's target, without a fuzzer.
//   manifest_replay CORPUS         files called accept-* must be accepted, refuse-* refused
//   manifest_replay --seeds OUT    writes the seeds anew: needed when the format changes
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/checkpoint/index_file.h"
#include "engine/checkpoint/manifest.h"
#include "io/checksum.h"
#include "tests/fuzz/manifest_target.h"

namespace overspill::fuzz {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

Json piece(const char* component, int64_t begin, int64_t elements, const char* file, uint64_t offset,
           uint64_t bytes) {
  return {{"component", component},
          {"begin", begin},
          {"elements", elements},
          {"file", file},
          {"offset", offset},
          {"bytes", bytes},
          {"checksums", range_checksums(file, offset, bytes)}};
}

Json parameter(const char* name, const std::vector<int64_t>& shape, int64_t begin, int64_t elements,
               const std::vector<std::string>& aliases = {}) {
  return {{"name", name},         {"aliases", aliases}, {"shape", shape}, {"begin", begin},
          {"elements", elements}, {"step", 3},          {"group", 0},     {"trainable", true}};
}

Json unit(const char* name, const char* format, const char* dtype, int64_t elements, Json parameters,
          Json pieces) {
  Json components = Json::array({format == std::string_view("fp32") ? "p" : "hi"});
  const bool frozen = format == std::string_view("frozen");
  if (dtype == std::string_view("BF16") && !frozen) components.push_back("lo");
  if (!frozen) components.insert(components.end(), {"m", "v"});
  return {{"name", name},
          {"optimizer", frozen ? "" : "adam"},
          {"format", format},
          {"components", std::move(components)},
          {"dtype", dtype},
          {"elements", elements},
          {"parameters", std::move(parameters)},
          {"pieces", std::move(pieces)}};
}

std::string manifest(Json units) {
  return sealed(Json{{"checksum", "0000000000000000"},
                     {"version", 3},
                     {"step", 12},
                     {"skipped_steps", 1},
                     {"world", 1},
                     {"units", std::move(units)},
                     {"extra", "{\"position\": 7}"}}
                    .dump());
}

Json split_unit() {
  Json pieces = Json::array();
  for (const char* component : {"hi", "lo"}) {
    pieces.push_back(piece(component, 0, 40, "resident.bin", 0, 80));
    pieces.push_back(piece(component, 40, 24, "slab-b-1.bin", 512, 512));
  }
  for (const char* component : {"m", "v"}) pieces.push_back(piece(component, 0, 64, "slab-b-1.bin", 0, 4096));
  return unit(
      "layer.0", "exact", "BF16", 64,
      {parameter("layer.0.weight", {6, 8}, 0, 48, {"head.weight"}), parameter("layer.0.bias", {13}, 50, 13)},
      std::move(pieces));
}

Json scaled_unit() {
  Json pieces =
      Json::array({piece("hi", 0, 256, "resident.bin", 0, 512), piece("lo", 0, 256, "resident.bin", 7, 256),
                   piece("m", 0, 128, "slab-b-1.bin", 0, 130), piece("m", 128, 128, "slab-b-1.bin", 130, 256),
                   piece("v", 0, 256, "slab-b-1.bin", 512, 260)});
  return unit("eight", "8bit", "BF16", 256, Json::array({parameter("eight", {16, 16}, 0, 256)}),
              std::move(pieces));
}

Json strided_unit() {
  Json conv = parameter("conv", {4, 2, 3}, 0, 24);
  conv["strides"] = {6, 1, 2};
  Json pieces = Json::array();
  for (const char* component : {"p", "m", "v"})
    pieces.push_back(piece(component, 0, 24, "resident.bin", 100, 96));
  return unit("conv", "fp32", "F32", 24, Json::array({conv}), std::move(pieces));
}

Json frozen_unit(const char* dtype, int64_t elements, int64_t bytes) {
  const std::string name = std::string("frozen.") + dtype;
  Json tensor = parameter(name.c_str(), {elements}, 0, elements);
  tensor["trainable"] = false;
  return unit(name.c_str(), "frozen", dtype, elements, Json::array({tensor}),
              Json::array({piece("hi", 0, elements, "slab-a-0.bin", 4096, static_cast<uint64_t>(bytes))}));
}

void write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// Of the unit that the target knows.
std::string index() {
  std::vector<engine::ManifestUnit> units(1);
  units[0].components = {"p", "m", "v"};
  const auto add = [&](const char* component, int64_t begin, int64_t elements, const char* file,
                       int64_t offset) {
    const std::string& data = ManifestTarget::files().at(file);
    const auto bytes = std::as_bytes(std::span(data)).subspan(static_cast<size_t>(offset), elements * 4);
    units[0].pieces.push_back(
        {component, begin, elements, {file, offset, elements * 4, io::block_checksums(bytes)}});
  };
  add("p", 0, 48, "resident.bin", 16);
  add("m", 0, 20, "slab-b-1.bin", 512);
  add("m", 20, 28, "resident.bin", 300);
  add("v", 0, 48, "slab-a-0.bin", 131'000);
  const fs::path folder = fs::temp_directory_path() / "test-of-overspill-seed";
  fs::create_directories(folder);
  engine::write_index(folder, engine::kIndexFile, units, {});
  std::ifstream file(folder / engine::kIndexFile, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  fs::remove_all(folder);
  return text;
}

int write_seeds(const fs::path& out) {
  fs::create_directories(out);
  write(out / "accept-empty.json", manifest(Json::array()));
  write(out / "accept-split.json", manifest(Json::array({split_unit()})));
  write(out / "accept-scales.json", manifest(Json::array({scaled_unit()})));
  write(out / "accept-strides.json", manifest(Json::array({strided_unit()})));
  write(out / "accept-frozen.json",
        manifest(Json::array({frozen_unit("I64", 10, 80), frozen_unit("F16", 33, 66)})));
  write(out / "accept-blocks.json", manifest(Json::array({frozen_unit("F32", 30'000, 131'072)})));
  write(out / "accept-all.json",
        manifest(Json::array({split_unit(), strided_unit(), frozen_unit("BF16", 5, 4096)})));
  write(out / "accept-index.bin", index());
  write(out / "refuse-index.bin", index().substr(0, 200));
  write(out / "refuse-not-json.json", "{");
  write(out / "refuse-version.json", "{\"version\":1}");
  std::string flipped = manifest(Json::array({split_unit()}));
  flipped[flipped.size() / 2] ^= 1;
  write(out / "refuse-flipped.json", flipped);
  return 0;
}

int replay(const fs::path& corpus) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(corpus)) files.push_back(entry.path());
  std::ranges::sort(files);
  ManifestTarget target(fs::temp_directory_path());
  int accepted_files = 0, wrong = 0;
  for (const fs::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    fmt::print("{}\n", path.filename().string());  // before it may crash
    std::fflush(stdout);
    const bool accepted = target.run(text);
    accepted_files += accepted ? 1 : 0;
    const std::string name = path.filename().string();
    if ((name.starts_with("accept-") && !accepted) || (name.starts_with("refuse-") && accepted)) {
      fmt::print("  was {}\n", accepted ? "accepted" : "refused");
      ++wrong;
    }
  }
  fmt::print("{} files, {} accepted, {} otherwise than their names say\n", files.size(), accepted_files,
             wrong);
  return wrong == 0 && accepted_files > 0 ? 0 : 1;
}

}  // namespace
}  // namespace overspill::fuzz

int main(int argc, char** argv) {
  if (argc == 3 && std::string_view(argv[1]) == "--seeds") return overspill::fuzz::write_seeds(argv[2]);
  if (argc == 2) return overspill::fuzz::replay(argv[1]);
  fmt::print(stderr, "manifest_replay CORPUS | --seeds OUT\n");
  return 2;
}
