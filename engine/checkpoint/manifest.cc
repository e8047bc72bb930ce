#include "engine/checkpoint/manifest.h"

#define XXH_STATIC_LINKING_ONLY  // the state on the stack
#include <fmt/format.h>
#include <xxhash.h>

#include <exception>
#include <nlohmann/json.hpp>
#include <numeric>
#include <system_error>
#include <utility>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/index_file.h"
#include "engine/checkpoint/manifest_check.h"
#include "engine/checkpoint/manifest_reader.h"
#include "io/checksum.h"

namespace overspill::engine {
namespace {

using Json = nlohmann::json;

// "checksum" is the first of the sorted keys, so a manifest of ours begins with these bytes and the digits.
constexpr std::string_view kBeforeOwnSum = R"({"checksum":")";
constexpr std::string_view kNoOwnSum = "0000000000000000";

std::string read_text(const std::filesystem::path& path, int64_t bytes_max) {
  const CheckpointFile file = CheckpointFile::open(path);
  const int64_t bytes = file.bytes();
  if (bytes > bytes_max) {
    throw MalformedManifest(fmt::format("it has {} bytes, more than any manifest ({})", bytes, bytes_max));
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read_at(std::as_writable_bytes(std::span(text)), 0);
  return text;
}

/// XXH3-64 of the whole text, the digits of the checksum itself taken as zeros.
std::string own_sum(std::string_view text) {
  const std::string_view rest = text.substr(kBeforeOwnSum.size() + kHexDigits);
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, kBeforeOwnSum.data(), kBeforeOwnSum.size());
  XXH3_64bits_update(&state, kNoOwnSum.data(), kNoOwnSum.size());
  XXH3_64bits_update(&state, rest.data(), rest.size());
  return fmt::format("{:016x}", XXH3_64bits_digest(&state));
}

/// A flipped bit in a step count or in the caller's own text would otherwise be a wrong number.
void check_own_sum(std::string_view text) {
  if (!text.starts_with(kBeforeOwnSum) || text.size() < kBeforeOwnSum.size() + kHexDigits)
    throw MalformedManifest("it does not begin with its checksum");
  const std::string found = own_sum(text);
  if (text.substr(kBeforeOwnSum.size(), kHexDigits) != found) {
    throw MalformedManifest(
        fmt::format("its {} bytes have the checksum {}, and another is written in it: damaged or edited",
                    text.size(), found));
  }
}

/// A damaged text is not parsed at all.
Manifest parse_checked(std::string_view text) {
  check_own_sum(text);
  return parse_manifest(text);
}

Json to_json(const ManifestUnit& unit) {
  Json segments = Json::array();
  for (const ManifestSegment& segment : unit.segments) {
    segments.push_back({{"name", segment.name},
                        {"aliases", segment.aliases},
                        {"shape", segment.shape},
                        {"begin", segment.begin},
                        {"elements", segment.elements},
                        {"step", segment.step},
                        {"group", segment.group},
                        {"trainable", segment.trainable}});
    if (!segment.strides.empty()) segments.back()["strides"] = segment.strides;
  }
  return {{"name", unit.name},
          {"optimizer", unit.optimizer},
          {"format", unit.format},
          {"components", unit.components},
          {"dtype", unit.dtype},
          {"elements", unit.elements},
          {"parameters", std::move(segments)}};
}

Json to_json(const IndexFile& index) {
  return {{"file", index.file},
          {"bytes", index.bytes},
          {"checksum", fmt::format("{:016x}", index.checksum)},
          {"shard", index.shard.number},
          {"shards", index.shard.of}};
}

std::string to_text(const std::filesystem::path& path, const Manifest& manifest) {
  try {
    Json units = Json::array(), indexes = Json::array();
    for (const ManifestUnit& unit : manifest.units) units.push_back(to_json(unit));
    for (const IndexFile& index : manifest.indexes) indexes.push_back(to_json(index));
    std::string text = Json{{"checksum", kNoOwnSum},         {"version", kManifestVersion},
                            {"step", manifest.step},         {"skipped_steps", manifest.skipped_steps},
                            {"world", manifest.world},       {"units", std::move(units)},
                            {"indexes", std::move(indexes)}, {"extra", manifest.extra_json}}
                           .dump();
    return text.replace(kBeforeOwnSum.size(), kHexDigits, own_sum(text));
  } catch (const Json::exception& error) {
    throw CheckpointError(
        fmt::format("{}: cannot be written: {}; names must be UTF-8", path.string(), error.what()));
  }
}

}  // namespace

std::string manifest_text(const Manifest& manifest) {
  return to_text(kManifestFile, manifest);
}

Manifest read_manifest_text(const std::filesystem::path& folder, int64_t bytes_max) {
  const std::filesystem::path path = folder / kManifestFile;
  std::error_code ignored;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, ignored))) {
    throw CheckpointError(fmt::format(
        "{}: there is none, so there is no complete checkpoint here (a save that was cut off leaves "
        "none); name another folder",
        path.string()));
  }
  Manifest manifest;
  try {
    manifest = parse_checked(read_text(path, bytes_max));
  } catch (const MalformedManifest& error) {
    throw CheckpointError(fmt::format("{}: {}; use another checkpoint", path.string(), error.what()));
  }
  check_manifest_text(folder, manifest);
  return manifest;
}

void read_shards(const std::filesystem::path& folder, Manifest& manifest, std::span<const size_t> indexes) {
  std::vector<UnitShard> read;
  for (const size_t index : indexes) {
    read_index(folder, manifest.indexes.at(index), manifest);
    read.push_back(manifest.indexes[index].shard);
  }
  if (manifest.indexes.empty()) read.push_back({});
  check_pieces(folder, manifest, read);
}

Manifest read_manifest(const std::filesystem::path& folder, int64_t bytes_max) {
  Manifest manifest = read_manifest_text(folder, bytes_max);
  std::vector<size_t> all(manifest.indexes.size());
  std::iota(all.begin(), all.end(), size_t{0});
  read_shards(folder, manifest, all);
  return manifest;
}

void write_manifest(const std::filesystem::path& folder, const Manifest& manifest, int64_t bytes_max,
                    io::StallWatch* watch) {
  check_manifest_text(folder, manifest);
  const UnitShard whole[] = {{}};
  check_pieces(folder, manifest, whole);
  Manifest out = manifest;
  out.indexes = {write_index(folder, kIndexFile, manifest.units, {}, kIndexBytesMax, watch)};
  write_manifest_text(folder, out, bytes_max, watch);
}

void write_manifest_text(const std::filesystem::path& folder, const Manifest& manifest, int64_t bytes_max,
                         io::StallWatch* watch) {
  // What could not be read back is not written: the checkpoint before it stays the last good one.
  check_manifest_text(folder, manifest);
  const std::filesystem::path path = folder / kManifestFile;
  const std::string text = to_text(path, manifest);
  if (std::cmp_greater(text.size(), bytes_max)) {
    throw CheckpointError(fmt::format(
        "{}: would have {} bytes, and no reader takes more than {}: this model has too many parameters for "
        "one checkpoint; train fewer in one engine",
        path.string(), text.size(), bytes_max));
  }
  const std::filesystem::path temporary = folder / kUnfinishedManifestFile;
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);  // of a save that was cut off
  try {
    CheckpointFile file = CheckpointFile::create(temporary, 0600);
    file.write(std::as_bytes(std::span(text)));
    file.sync(watch);
    rename_file(temporary, path);
  } catch (...) {
    if (!io::is_stalled(std::current_exception())) std::filesystem::remove(temporary, ignored);
    throw;
  }
  engine::sync_folder(folder, watch);
}

}  // namespace overspill::engine
