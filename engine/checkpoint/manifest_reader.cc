#include "engine/checkpoint/manifest_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "engine/checkpoint/manifest_check.h"

namespace overspill::engine {
namespace {

using Json = nlohmann::json;

constexpr size_t kListMax = size_t{1} << 16;  // dimensions, aliases: far beyond any model's

struct Objects {};

/// The name of a field in an object of the manifest, and where its value is stored.
struct Field {
  std::string_view name;
  std::variant<Objects, int64_t*, bool*, std::string*, std::vector<int64_t>*, std::vector<std::string>*> to;
  bool optional = false;
  bool seen = false;
};

const char* wanted(const Field& field) {
  static constexpr const char* kWanted[] = {
      "a list of objects", "a non-negative integer below 2^63",        "true or false",
      "a string",          "a list of non-negative integers (< 2^63)", "a list of strings"};
  return kWanted[field.to.index()];
}

std::vector<uint64_t> from_hex(const std::string& hex) {
  if (hex.size() % kHexDigits != 0) throw MalformedManifest("'checksums' of a range are not 16 digits each");
  std::vector<uint64_t> checksums(hex.size() / kHexDigits);
  for (size_t i = 0; i < checksums.size(); ++i) {
    const char* const begin = hex.data() + i * kHexDigits;
    const auto [end, error] = std::from_chars(begin, begin + kHexDigits, checksums[i], 16);
    if (error != std::errc() || end != begin + kHexDigits)
      throw MalformedManifest("'checksums' of a range are not hexadecimal");
  }
  return checksums;
}

uint64_t checksum_of_index(const std::string& hex) {
  if (hex.size() != kHexDigits) throw MalformedManifest("'checksum' of an index is not 16 digits");
  return from_hex(hex)[0];
}

/// Gives what version 2 of the manifest called otherwise its name of today: the format "exact", and the
/// component "p" of fp32.
void upgrade(ManifestUnit& unit) {
  if (unit.format == "bf16_split") {
    unit.format = "exact";
  } else if (unit.format == "fp32") {
    for (ManifestPiece& piece : unit.pieces)
      piece.component = piece.component == "hi" ? "p" : piece.component;
  } else if (unit.format != "frozen") {
    throw MalformedManifest(
        fmt::format("unit '{:.64}' has the unknown format '{:.64}'", unit.name, unit.format));
  }
  if (unit.format != "frozen") unit.optimizer = "adam";
  for (const std::string_view component : components_of(unit)) unit.components.emplace_back(component);
}

/// The parser calls these methods as it reads. Each object that has begun and not ended is a frame. Its
/// values are collected in the structs below; when the object ends, they move into the object around it.
class Reader final : public nlohmann::json_sax<Json> {
 public:
  Manifest take() {
    if (version_ < 2 || version_ > kManifestVersion) {
      throw MalformedManifest(
          fmt::format("its version is {} and this program reads 2 to {}", version_, kManifestVersion));
    }
    const bool indexed = version_ == kManifestVersion;
    if (with_pieces_ != (indexed ? 0 : manifest_.units.size()) || indexed == manifest_.indexes.empty()) {
      throw MalformedManifest(fmt::format(
          "{} of {} units have 'pieces', and it has {} 'indexes': a manifest of version {} has {}",
          with_pieces_, manifest_.units.size(), manifest_.indexes.size(), version_,
          indexed ? "the second alone" : "the first alone"));
    }
    const size_t named = version_ == 2 ? 0 : manifest_.units.size();
    if (with_optimizer_ != named || with_components_ != named) {
      throw MalformedManifest(fmt::format(
          "{} of {} units have an 'optimizer', {} have 'components', where version {} has {} of each",
          with_optimizer_, manifest_.units.size(), with_components_, version_, named));
    }
    if (version_ == 2) std::ranges::for_each(manifest_.units, upgrade);
    manifest_.version = kManifestVersion;
    return std::move(manifest_);
  }

  bool null() override { return refuse(); }
  bool number_integer(int64_t) override { return refuse(); }  // a negative one
  bool number_float(double, const std::string&) override { return refuse(); }
  bool binary(Json::binary_t&) override { return refuse(); }

  bool boolean(bool value) override {
    if (auto** to = std::get_if<bool*>(&place().to); to != nullptr) {
      **to = value;
      return true;
    }
    return refuse();
  }

  bool number_unsigned(uint64_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return refuse();
    return store(static_cast<int64_t>(value));
  }

  bool string(std::string& value) override { return store(std::move(value)); }

  bool start_array(size_t) override {
    Field& field = place();
    Frame& frame = frames_.back();
    const bool takes_list = field.to.index() == 0 || field.to.index() >= 4;
    if (frame.in_list || !takes_list) return refuse();
    frame.in_list = true;
    return true;
  }

  bool end_array() override {
    frames_.back().in_list = false;
    std::visit(
        [](auto to) {
          if constexpr (requires { to->shrink_to_fit(); }) to->shrink_to_fit();
        },
        frames_.back().field->to);
    return true;
  }

  bool start_object(size_t) override {
    if (frames_.empty()) return open_root();
    const Field& field = place();
    if (!std::holds_alternative<Objects>(field.to) || !frames_.back().in_list) return refuse();
    if (field.name == "units") return open_unit();
    if (field.name == "parameters") return open_segment();
    if (field.name == "indexes") return open_index();
    return open_piece();
  }

  bool key(std::string& name) override {
    Frame& frame = frames_.back();
    const auto found = std::ranges::find(frame.fields, std::string_view(name), &Field::name);
    if (found == frame.fields.end()) {
      throw MalformedManifest(fmt::format("{} has the field '{:.64}', which versions 2 to {} do not have",
                                          frame.what, name, kManifestVersion));
    }
    if (std::exchange(found->seen, true))
      throw MalformedManifest(fmt::format("{} has '{}' twice", frame.what, found->name));
    frame.field = &*found;
    return true;
  }

  bool end_object() override {
    const Frame frame = std::move(frames_.back());
    frames_.pop_back();
    for (const Field& field : frame.fields) {
      if (!field.seen && !field.optional)
        throw MalformedManifest(fmt::format("{} has no '{}'", frame.what, field.name));
    }
    (this->*frame.close)(frame);
    return true;
  }

  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    throw MalformedManifest(fmt::format("not JSON: {:.200}", error.what()));
  }

 private:
  struct Frame {
    const char* what;
    std::vector<Field> fields;
    void (Reader::*close)(const Frame&);
    Field* field = nullptr;  // the parser has read its name, and reads its value next
    bool in_list = false;
  };

  /// The field that the value which the parser reads next belongs to, alone or as an element of its list.
  Field& place() {
    if (frames_.empty()) throw MalformedManifest("it is no object");
    return *frames_.back().field;
  }

  bool refuse() {
    const Field& field = place();
    throw MalformedManifest(
        fmt::format("'{}' of {} is not {}", field.name, frames_.back().what, wanted(field)));
  }

  template <typename Value>
  bool store(Value&& value) {
    using Plain = std::remove_cvref_t<Value>;
    Field& field = place();
    if (!frames_.back().in_list) {
      auto** to = std::get_if<Plain*>(&field.to);
      if (to == nullptr) return refuse();
      **to = std::forward<Value>(value);
      return true;
    }
    auto** list = std::get_if<std::vector<Plain>*>(&field.to);
    if (list == nullptr) return refuse();
    if ((*list)->size() == kListMax) {
      throw MalformedManifest(
          fmt::format("'{}' of {} has more than {} values", field.name, frames_.back().what, kListMax));
    }
    (*list)->push_back(std::forward<Value>(value));
    return true;
  }

  bool open_root() {
    frames_.push_back({"the manifest",
                       {{"checksum", &checksum_},
                        {"extra", &manifest_.extra_json},
                        {"indexes", Objects{}, true},
                        {"skipped_steps", &manifest_.skipped_steps},
                        {"step", &manifest_.step},
                        {"units", Objects{}},
                        {"version", &version_},
                        {"world", &manifest_.world}},
                       &Reader::close_root});
    return true;
  }

  bool open_unit() {
    unit_ = {};
    frames_.push_back({"a unit",
                       {{"components", &unit_.components, true},
                        {"dtype", &unit_.dtype},
                        {"elements", &unit_.elements},
                        {"format", &unit_.format},
                        {"name", &unit_.name},
                        {"optimizer", &unit_.optimizer, true},
                        {"parameters", Objects{}},
                        {"pieces", Objects{}, true}},
                       &Reader::close_unit});
    return true;
  }

  bool open_segment() {
    segment_ = {};
    // Strides are absent where the parameter lies row-major, and there is no second way to say so.
    frames_.push_back({"a parameter",
                       {{"aliases", &segment_.aliases},
                        {"begin", &segment_.begin},
                        {"elements", &segment_.elements},
                        {"group", &segment_.group},
                        {"name", &segment_.name},
                        {"shape", &segment_.shape},
                        {"step", &segment_.step},
                        {"strides", &segment_.strides, true},
                        {"trainable", &segment_.trainable}},
                       &Reader::close_segment});
    return true;
  }

  bool open_index() {
    index_ = {};
    frames_.push_back({"an index",
                       {{"bytes", &index_.bytes},
                        {"checksum", &checksums_},
                        {"file", &index_.file},
                        {"shard", &index_.shard.number},
                        {"shards", &index_.shard.of}},
                       &Reader::close_index});
    return true;
  }

  bool open_piece() {
    piece_ = {};
    frames_.push_back({"a piece",
                       {{"begin", &piece_.begin},
                        {"bytes", &piece_.range.bytes},
                        {"checksums", &checksums_},
                        {"component", &piece_.component},
                        {"elements", &piece_.elements},
                        {"file", &piece_.range.file},
                        {"offset", &piece_.range.offset}},
                       &Reader::close_piece});
    return true;
  }

  static bool has(const Frame& frame, std::string_view name) {
    return std::ranges::find(frame.fields, name, &Field::name)->seen;
  }

  void close_root(const Frame&) {}

  void close_unit(const Frame& frame) {
    with_optimizer_ += has(frame, "optimizer") ? 1 : 0;
    with_components_ += has(frame, "components") ? 1 : 0;
    with_pieces_ += has(frame, "pieces") ? 1 : 0;
    unit_.segments.shrink_to_fit();
    unit_.pieces.shrink_to_fit();
    manifest_.units.push_back(std::move(unit_));
  }

  void close_segment(const Frame& frame) {
    if (has(frame, "strides") && segment_.strides.empty())
      throw MalformedManifest("'strides' of a parameter are an empty list");
    unit_.segments.push_back(std::move(segment_));
  }

  void close_index(const Frame&) {
    index_.checksum = checksum_of_index(checksums_);
    manifest_.indexes.push_back(std::move(index_));
  }

  void close_piece(const Frame&) {
    piece_.range.block_checksums = from_hex(checksums_);
    unit_.pieces.push_back(std::move(piece_));
  }

  std::vector<Frame> frames_;
  Manifest manifest_;
  int64_t version_ = 0;
  std::string checksum_;  // parse_checked() compares it with the text
  ManifestUnit unit_;
  ManifestSegment segment_;
  ManifestPiece piece_;
  IndexFile index_;
  std::string checksums_;
  size_t with_optimizer_ = 0;
  size_t with_components_ = 0;
  size_t with_pieces_ = 0;
};

}  // namespace

Manifest parse_manifest(std::string_view text) {
  Reader reader;
  Json::sax_parse(text, &reader);
  return reader.take();
}

}  // namespace overspill::engine
