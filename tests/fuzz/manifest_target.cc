#include "tests/fuzz/manifest_target.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>

#include "engine/checkpoint/checkpoint_reader.h"
#include "engine/checkpoint/index_file.h"
#include "engine/checkpoint/manifest.h"
#include "io/checksum.h"

namespace overspill::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kBeforeOwnSum = R"({"checksum":")";
constexpr size_t kDigits = 16;
constexpr std::string_view kBeforeIndex = "OVSPIDX";

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

std::string hex(uint64_t value) {
  char digits[kDigits + 1];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
  return digits;
}

std::string content(const std::string& name, size_t bytes) {
  std::string out(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i)
    out[i] = static_cast<char>((i * 131 + name.size() * 7 + (i >> 8)) ^ name[0]);
  return out;
}

/// Reused from input to input: creating and removing a file would be most of the time.
void overwrite(const fs::path& path, std::string_view text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  require(file >= 0 && ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size()),
          "the scratch folder takes the input");
  ::close(file);
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A manifest of one unit whose pieces are in these bytes.
std::string text_of_index(std::string_view index) {
  return sealed(fmt::format(
      R"({{"checksum":"0000000000000000","extra":"{{}}","indexes":[{{"bytes":{},"checksum":"{:016x}","file":)"
      R"("index.bin","shard":0,"shards":1}}],"skipped_steps":1,"step":12,"units":[{{"components":["p","m","v"],)"
      R"("dtype":"F32","elements":48,"format":"fp32","name":"u","optimizer":"adam","parameters":[{{"aliases":[],)"
      R"("begin":0,"elements":40,"group":0,"name":"u.w","shape":[5,8],"step":3,"trainable":true}}]}}],)"
      R"("version":4,"world":1}})",
      index.size(), io::checksum_block(std::as_bytes(std::span(index)))));
}

}  // namespace

std::string sealed(std::string text) {
  const size_t digits = kBeforeOwnSum.size();
  if (!text.starts_with(kBeforeOwnSum) || text.size() < digits + kDigits) return text;
  text.replace(digits, kDigits, kDigits, '0');
  return text.replace(digits, kDigits, hex(io::checksum_block(std::as_bytes(std::span(text)))));
}

std::string range_checksums(const std::string& file, uint64_t offset, uint64_t bytes) {
  const auto found = ManifestTarget::files().find(file);
  if (found == ManifestTarget::files().end()) return "";
  const std::string& data = found->second;
  if (offset > data.size() || bytes > data.size() - offset) return "";
  std::string sums;
  for (uint64_t at = 0; at < bytes; at += io::kChecksumBlockBytes) {
    sums += hex(io::checksum_block(std::as_bytes(
        std::span(data).subspan(offset + at, std::min<uint64_t>(io::kChecksumBlockBytes, bytes - at)))));
  }
  return sums;
}

const std::map<std::string, std::string>& ManifestTarget::files() {
  static const std::map<std::string, std::string> kFiles = {
      {"slab-a-0.bin", content("slab-a-0.bin", 150'000)},  // three blocks
      {"slab-b-1.bin", content("slab-b-1.bin", 4096)},
      {"resident.bin", content("resident.bin", 6000)},
      {"empty", ""}};
  return kFiles;
}

ManifestTarget::ManifestTarget(const fs::path& parent) {
  std::string name = (parent / "test-of-overspill-fuzz-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no scratch folder in " + parent.string());
  folder_ = name;
  merged_ = folder_ / "merged";
  again_ = folder_ / "again";
  fs::create_directory(again_);
  for (const auto& [file, bytes] : files()) {
    overwrite(folder_ / file, bytes);
    overwrite(again_ / file, bytes);
  }
  fs::create_directory(folder_ / "folder");
  fs::create_symlink("resident.bin", folder_ / "link");
}

ManifestTarget::~ManifestTarget() {
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

bool ManifestTarget::run(std::string_view input) {
  if (!input.starts_with(kBeforeIndex)) return run_text(input);
  overwrite(folder_ / engine::kIndexFile, input);
  return run_text(text_of_index(input));
}

bool ManifestTarget::run_text(std::string_view text) {
  overwrite(folder_ / engine::kManifestFile, text);
  engine::Manifest manifest;
  try {
    manifest = engine::read_manifest(folder_);
  } catch (const engine::CheckpointError& error) {
    require(std::string_view(error.what()).find(folder_.string()) != std::string_view::npos,
            "an error names the manifest");
    return false;
  }
  require(text == sealed(std::string(text)), "what is accepted fits its own checksum");

  // What is accepted comes back the same after it was written.
  engine::write_manifest(again_, manifest);
  const std::string once = read_text(again_ / engine::kManifestFile);
  engine::write_manifest(again_, engine::read_manifest(again_));
  require(read_text(again_ / engine::kManifestFile) == once, "what is written reads as the same");

  bool whole = true;
  try {
    engine::verify_data(engine::CheckpointReader(folder_), manifest);
  } catch (const engine::CheckpointError&) {
    whole = false;
  }
  for (const char* dtype : {"bf16", "fp32"}) {
    fs::remove_all(merged_);
    try {
      const engine::MergeResult result = engine::merge_checkpoint(
          folder_, merged_, {dtype, text.size() % 2 == 0 ? 5000 : 1 << 20}, nullptr, nullptr);
      int64_t bytes = 0;
      for (const std::string& file : result.files)
        bytes += static_cast<int64_t>(fs::file_size(merged_ / file));
      require(bytes >= result.bytes, "a merge writes all it counts");
    } catch (const engine::CheckpointError&) {
      require(!whole, "what is whole can be merged");
      require(!fs::exists(merged_), "a failed merge leaves nothing");
    }
  }
  return true;
}

}  // namespace overspill::fuzz
