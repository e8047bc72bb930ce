#include "engine/checkpoint/manifest.h"

#define XXH_STATIC_LINKING_ONLY  // the state on the stack
#include <fmt/format.h>
#include <xxhash.h>

#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/manifest_check.h"
#include "io/checksum.h"

namespace overspill::engine {
namespace {

using Json = nlohmann::json;

constexpr int64_t kManifestBytesMax = int64_t{1} << 30;  // a checkpoint of about 3 TB
constexpr int kDepthMax = 8;                             // ours has 6
constexpr size_t kHexDigits = 16;                        // of one checksum
// "checksum" is the first of the sorted keys, so a manifest of ours begins with these bytes and the digits.
constexpr std::string_view kBeforeOwnSum = R"({"checksum":")";
constexpr std::string_view kNoOwnSum = "0000000000000000";

/// Thrown while reading; the caller adds the file's name and the way out.
class Malformed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An object of the file of which every key is asked for by name, and none is left over: a typo, or a field
/// of another version, is an error and never a silent default.
class Fields {
 public:
  Fields(const Json& object, const char* what, size_t count, const char* optional = nullptr)
      : object_(object), what_(what) {
    if (!object.is_object()) throw Malformed(fmt::format("{} is no object", what));
    if (optional != nullptr && has(optional)) ++count;
    if (object.size() != count) {
      throw Malformed(fmt::format("{} has {} fields where {} belong", what, object.size(), count));
    }
  }

  bool has(const char* key) const { return object_.contains(key); }

  int64_t integer(const char* key) const { return as_integer(at(key), key); }

  bool boolean(const char* key) const {
    const Json& value = at(key);
    if (!value.is_boolean()) wrong(key, "true or false");
    return value.get<bool>();
  }

  const std::string& text(const char* key) const {
    const Json& value = at(key);
    if (!value.is_string()) wrong(key, "a string");
    return value.get_ref<const std::string&>();
  }

  std::vector<int64_t> integers(const char* key) const {
    return list<int64_t>(key, [&](const Json& value) { return as_integer(value, key); });
  }

  std::vector<std::string> texts(const char* key) const {
    return list<std::string>(key, [&](const Json& value) {
      if (!value.is_string()) wrong(key, "a list of strings");
      return value.get<std::string>();
    });
  }

  template <typename Element, typename Read>
  std::vector<Element> list(const char* key, Read read) const {
    const Json& value = at(key);
    if (!value.is_array()) wrong(key, "a list");
    std::vector<Element> elements;
    elements.reserve(value.size());
    for (const Json& element : value) elements.push_back(read(element));
    return elements;
  }

 private:
  const Json& at(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) throw Malformed(fmt::format("{} has no '{}'", what_, key));
    return *found;
  }

  int64_t as_integer(const Json& value, const char* key) const {
    // Neither a sign, nor a fraction, nor an exponent.
    if (!value.is_number_unsigned()) wrong(key, "a non-negative integer");
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      wrong(key, "an integer below 2^63");
    return static_cast<int64_t>(number);
  }

  [[noreturn]] void wrong(const char* key, const char* wanted) const {
    throw Malformed(fmt::format("'{}' of {} is not {}", key, what_, wanted));
  }

  const Json& object_;
  const char* what_;
};

// Checksums are one string of hexadecimal digits a range: a tenth of the memory of a list of numbers, and no
// reader rounds them to a double.
std::string to_hex(const std::vector<uint64_t>& checksums) {
  std::string hex;
  hex.reserve(checksums.size() * kHexDigits);
  for (const uint64_t checksum : checksums) fmt::format_to(std::back_inserter(hex), "{:016x}", checksum);
  return hex;
}

std::vector<uint64_t> from_hex(const std::string& hex) {
  if (hex.size() % kHexDigits != 0) throw Malformed("'checksums' of a range are not 16 digits each");
  std::vector<uint64_t> checksums(hex.size() / kHexDigits);
  for (size_t i = 0; i < checksums.size(); ++i) {
    const char* const begin = hex.data() + i * kHexDigits;
    const auto [end, error] = std::from_chars(begin, begin + kHexDigits, checksums[i], 16);
    if (error != std::errc() || end != begin + kHexDigits) {
      throw Malformed("'checksums' of a range are not hexadecimal");
    }
  }
  return checksums;
}

FileRange read_file_range(const Fields& piece) {
  return {.file = piece.text("file"),
          .offset = piece.integer("offset"),
          .bytes = piece.integer("bytes"),
          .block_checksums = from_hex(piece.text("checksums"))};
}

ManifestPiece read_piece(const Json& json) {
  const Fields piece(json, "a piece", 7);
  return {.component = piece.text("component"),
          .begin = piece.integer("begin"),
          .elements = piece.integer("elements"),
          .range = read_file_range(piece)};
}

/// Absent where the parameter lies row-major, and there is no second way to say so.
std::vector<int64_t> read_strides(const Fields& segment) {
  if (!segment.has("strides")) return {};
  auto strides = segment.integers("strides");
  if (strides.empty()) throw Malformed("'strides' of a parameter are an empty list");
  return strides;
}

ManifestSegment read_segment(const Json& json) {
  const Fields segment(json, "a parameter", 8, "strides");
  return {.name = segment.text("name"),
          .aliases = segment.texts("aliases"),
          .shape = segment.integers("shape"),
          .strides = read_strides(segment),
          .begin = segment.integer("begin"),
          .elements = segment.integer("elements"),
          .step = segment.integer("step"),
          .group = segment.integer("group"),
          .trainable = segment.boolean("trainable")};
}

/// Of version 2, which named the whole after its format.
void upgrade(ManifestUnit& unit) {
  if (unit.format == "bf16_split") {
    unit.format = "exact";
  } else if (unit.format == "fp32") {
    for (ManifestPiece& piece : unit.pieces)
      piece.component = piece.component == "hi" ? "p" : piece.component;
  } else if (unit.format != "frozen") {
    throw Malformed(fmt::format("unit '{}' has the unknown format '{}'", unit.name, unit.format));
  }
  if (unit.format != "frozen") unit.optimizer = "adam";
  for (const std::string_view component : components_of(unit)) unit.components.emplace_back(component);
}

ManifestUnit read_unit(const Json& json, int64_t version) {
  const Fields fields(json, "a unit", version == 2 ? 6 : 8);
  ManifestUnit unit{.name = fields.text("name"),
                    .optimizer = {},
                    .format = fields.text("format"),
                    .components = {},
                    .dtype = fields.text("dtype"),
                    .elements = fields.integer("elements"),
                    .segments = fields.list<ManifestSegment>("parameters", read_segment),
                    .pieces = fields.list<ManifestPiece>("pieces", read_piece)};
  if (version == 2) {
    upgrade(unit);
  } else {
    unit.optimizer = fields.text("optimizer");
    unit.components = fields.texts("components");
  }
  return unit;
}

Manifest read_root(const Json& json) {
  // The version first: another one may have other fields.
  if (!json.is_object() || !json.contains("version")) throw Malformed("it has no version");
  if (json["version"] != kManifestVersion && json["version"] != 2) {
    throw Malformed(fmt::format("its version is {} and this program reads 2 and {}",
                                json["version"].dump().substr(0, 20), kManifestVersion));
  }
  const Fields root(json, "the manifest", 7);
  const int64_t version = root.integer("version");
  return {
      .version = kManifestVersion,
      .step = root.integer("step"),
      .skipped_steps = root.integer("skipped_steps"),
      .world = root.integer("world"),
      .units = root.list<ManifestUnit>("units", [&](const Json& unit) { return read_unit(unit, version); }),
      .extra_json = root.text("extra")};
}

Json parse(std::string_view text) {
  const auto limit_depth = [](int depth, Json::parse_event_t, const Json&) {
    if (depth > kDepthMax) throw Malformed(fmt::format("nested more than {} deep", kDepthMax));
    return true;
  };
  return Json::parse(text, limit_depth);
}

std::string read_text(const std::filesystem::path& path) {
  const CheckpointFile file = CheckpointFile::open(path);
  const int64_t bytes = file.bytes();
  if (bytes > kManifestBytesMax) {
    throw Malformed(fmt::format("it has {} bytes, more than any manifest ({})", bytes, kManifestBytesMax));
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
    throw Malformed("it does not begin with its checksum");
  const std::string found = own_sum(text);
  if (text.substr(kBeforeOwnSum.size(), kHexDigits) != found) {
    throw Malformed(
        fmt::format("its {} bytes have the checksum {}, and another is written in it: damaged or edited",
                    text.size(), found));
  }
}

Json to_json(const ManifestUnit& unit) {
  Json segments = Json::array(), pieces = Json::array();
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
  for (const ManifestPiece& piece : unit.pieces) {
    pieces.push_back({{"component", piece.component},
                      {"begin", piece.begin},
                      {"elements", piece.elements},
                      {"file", piece.range.file},
                      {"offset", piece.range.offset},
                      {"bytes", piece.range.bytes},
                      {"checksums", to_hex(piece.range.block_checksums)}});
  }
  return {{"name", unit.name},
          {"optimizer", unit.optimizer},
          {"format", unit.format},
          {"components", unit.components},
          {"dtype", unit.dtype},
          {"elements", unit.elements},
          {"parameters", std::move(segments)},
          {"pieces", std::move(pieces)}};
}

std::string to_text(const std::filesystem::path& path, const Manifest& manifest) {
  try {
    Json units = Json::array();
    for (const ManifestUnit& unit : manifest.units) units.push_back(to_json(unit));
    std::string text = Json{{"checksum", kNoOwnSum},       {"version", manifest.version},
                            {"step", manifest.step},       {"skipped_steps", manifest.skipped_steps},
                            {"world", manifest.world},     {"units", std::move(units)},
                            {"extra", manifest.extra_json}}
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

Manifest manifest_from_text(std::string_view text) {
  try {
    return read_root(parse(text));
  } catch (const Malformed& error) {
    throw CheckpointError(fmt::format("another rank's manifest: {}", error.what()));
  } catch (const Json::exception& error) {
    throw CheckpointError(fmt::format("another rank's manifest is not JSON: {:.200}", error.what()));
  }
}

Manifest read_manifest(const std::filesystem::path& folder) {
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
    const std::string text = read_text(path);
    manifest = read_root(parse(text));
    check_own_sum(text);
  } catch (const Malformed& error) {
    throw CheckpointError(fmt::format("{}: {}; use another checkpoint", path.string(), error.what()));
  } catch (const Json::exception& error) {
    throw CheckpointError(
        fmt::format("{}: not JSON: {:.200}; use another checkpoint", path.string(), error.what()));
  }
  check_manifest(folder, manifest);
  return manifest;
}

void write_manifest(const std::filesystem::path& folder, const Manifest& manifest) {
  // What could not be read back is not written: the checkpoint before it stays the last good one.
  check_manifest(folder, manifest);
  const std::filesystem::path path = folder / kManifestFile;
  const std::string text = to_text(path, manifest);
  const std::filesystem::path temporary = path.string() + ".tmp";
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);  // of a save that was cut off
  try {
    CheckpointFile file = CheckpointFile::create(temporary, 0600);
    file.write(std::as_bytes(std::span(text)));
    file.sync();
    rename_file(temporary, path);
  } catch (...) {
    std::filesystem::remove(temporary, ignored);
    throw;
  }
  sync_folder(folder);
}

}  // namespace overspill::engine
