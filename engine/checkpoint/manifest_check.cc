#include "engine/checkpoint/manifest_check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/index_file.h"
#include "engine/partition/strides.h"

namespace overspill::engine {
namespace {

constexpr int64_t kBytesPerChecksum = int64_t{64} * 1024;  // of a checksum
constexpr int64_t kElementsOfUnitMax = int64_t{1} << 56;   // times 8 bytes stays far from overflow
constexpr size_t kNameBytesMax = 4096;

/// Empty for names that mean nothing.
std::span<const optim::ComponentSpec> specs_of(const ManifestUnit& unit) {
  try {
    return optim::components(optim::optimizer_named(unit.optimizer), optim::format_named(unit.format));
  } catch (const std::invalid_argument&) {
    return {};
  }
}

/// Null where the unit has none of that name, and for a frozen unit.
const optim::ComponentSpec* component_of(const ManifestUnit& unit, std::string_view name) {
  for (const optim::ComponentSpec& spec : specs_of(unit)) {
    if (spec.name == name) return &spec;
  }
  return nullptr;
}

/// Accumulates nothing: the first thing that is wrong ends the check.
class Check {
 public:
  Check(const std::filesystem::path& folder, const Manifest& manifest)
      : folder_(folder), manifest_(manifest) {}

  void pieces(std::span<const UnitShard> read) {
    for (const ManifestUnit& unit : manifest_.units) check_pieces_of(unit, read);
  }

  void text() {
    require(manifest_.version == kManifestVersion,
            "version {} where this program reads {}; use the program that wrote it", manifest_.version,
            kManifestVersion);
    require(manifest_.step >= 0 && manifest_.skipped_steps >= 0, "step {}, {} skipped", manifest_.step,
            manifest_.skipped_steps);
    require(manifest_.world >= 1, "a world of {} ranks", manifest_.world);
    for (const ManifestUnit& unit : manifest_.units) check_unit(unit);
    check_once(unit_names_, "units");
    check_once(parameter_names_, "parameters");
    check_indexes();
  }

 private:
  template <typename... Values>
  void require(bool holds, fmt::format_string<Values...> what, Values&&... values) const {
    if (holds) return;
    throw CheckpointError(fmt::format("{}: {}; the checkpoint is damaged or was edited, use another one",
                                      (folder_ / kManifestFile).string(),
                                      fmt::format(what, std::forward<Values>(values)...)));
  }

  void check_unit(const ManifestUnit& unit) {
    require(!unit.name.empty() && unit.name.size() <= kNameBytesMax, "a unit's name has {} bytes",
            unit.name.size());
    unit_names_.push_back(unit.name);
    require(!components_of(unit).empty(), "unit '{}' has the unknown format '{}' or optimizer '{}'",
            unit.name, unit.format, unit.optimizer);
    require(dtype_bytes(unit.dtype) > 0, "unit '{}' has the unknown dtype '{}'", unit.name, unit.dtype);
    const std::string_view dtype = weights_dtype(format_from_name(unit.format));
    require(dtype.empty() || unit.dtype == dtype, "unit '{}' has the format {} and the dtype {}", unit.name,
            unit.format, unit.dtype);
    require(std::ranges::equal(unit.components, components_of(unit)),
            "unit '{}' has other components than {} {} has", unit.name, unit.optimizer, unit.format);
    require(unit.elements >= 0 && unit.elements <= kElementsOfUnitMax, "unit '{}' has {} elements", unit.name,
            unit.elements);
    check_segments(unit);
  }

  /// Those of all shards, in their order.
  void check_indexes() {
    const auto shards = std::ssize(manifest_.indexes);
    std::vector<std::string_view> files;
    for (const IndexFile& index : manifest_.indexes) files.push_back(index.file);
    check_once(files, "indexes");
    for (int64_t i = 0; i < shards; ++i) {
      const IndexFile& index = manifest_.indexes[static_cast<size_t>(i)];
      require_plain(index.file);
      require(index.bytes > 0 && index.bytes <= kIndexBytesMax,
              "{} has {} bytes there, and an index at most {}", index.file, index.bytes, kIndexBytesMax);
      require(index.shard.number == i && index.shard.of == shards,
              "{} has shard {} of {}, where {} of {} is due", index.file, index.shard.number, index.shard.of,
              i, shards);
    }
    for (const ManifestUnit& unit : manifest_.units) {
      require(shards == 0 || unit.elements % shards == 0, "unit '{}' has {} elements, in {} equal shards",
              unit.name, unit.elements, shards);
    }
  }

  void check_segments(const ManifestUnit& unit) {
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (const ManifestSegment& segment : unit.segments) {
      check_parameter_name(segment.name);
      for (const std::string& alias : segment.aliases) check_parameter_name(alias);
      require(fits(segment.begin, segment.elements, unit.elements),
              "parameter '{}' has elements {} + {} of {} in its unit", segment.name, segment.begin,
              segment.elements, unit.elements);
      require(segment.step >= 0 && segment.group >= 0, "parameter '{}' has step {}, group {}", segment.name,
              segment.step, segment.group);
      require(product(segment.shape) == segment.elements, "parameter '{}' has {} elements in a shape of {}",
              segment.name, segment.elements, product(segment.shape));
      require(normal_strides(segment.shape, segment.strides) == segment.strides,
              "parameter '{}' of shape ({}) has the strides ({})", segment.name, beginning(segment.shape),
              beginning(segment.strides));
      if (segment.elements > 0) taken.emplace_back(segment.begin, segment.begin + segment.elements);
    }
    std::ranges::sort(taken);
    for (size_t i = 1; i < taken.size(); ++i) {
      require(taken[i - 1].second <= taken[i].first, "two parameters of unit '{}' have element {}", unit.name,
              taken[i].first);
    }
  }

  void check_parameter_name(const std::string& name) {
    // "__metadata__" has a meaning of its own in safetensors.
    require(!name.empty() && name.size() <= kNameBytesMax && name != "__metadata__",
            "'{}' cannot be a parameter's name", name.substr(0, 64));
    parameter_names_.push_back(name);
  }

  /// Sorted, not hashed: whoever wrote the names could make them collide.
  void check_once(std::vector<std::string_view>& names, std::string_view what) const {
    std::ranges::sort(names);
    const auto twice = std::ranges::adjacent_find(names);
    require(twice == names.end(), "two {} are called '{}'", what, twice == names.end() ? "" : *twice);
  }

  void check_pieces_of(const ManifestUnit& unit, std::span<const UnitShard> read) {
    for (const ManifestPiece& piece : unit.pieces) check_piece(unit, piece);
    for (const std::string_view component : components_of(unit)) {
      std::vector<std::pair<int64_t, int64_t>> covered;
      for (const ManifestPiece& piece : unit.pieces) {
        if (piece.component == component) covered.emplace_back(piece.begin, piece.begin + piece.elements);
      }
      std::ranges::sort(covered);
      auto piece = covered.cbegin();
      for (const UnitShard& shard : read) {
        int64_t at = unit.elements / shard.of * shard.number;
        const int64_t end = at + unit.elements / shard.of;
        for (; piece != covered.cend() && at < end; ++piece) {
          require(piece->first == at, "unit '{}', component {}: a piece begins at element {} where {} is due",
                  unit.name, component, piece->first, at);
          at = piece->second;
        }
        require(at == end, "unit '{}', component {}: pieces end at element {} of {}", unit.name, component,
                at, end);
      }
      require(piece == covered.cend(), "unit '{}', component {}: an element is in two pieces", unit.name,
              component);
    }
  }

  void check_piece(const ManifestUnit& unit, const ManifestPiece& piece) {
    const FileRange& range = piece.range;
    const optim::ComponentSpec* spec = component_of(unit, piece.component);
    require(component_element_bytes(unit, piece.component) > 0,
            "unit '{}' has a piece of component '{}', format {}", unit.name, piece.component, unit.format);
    require(piece.elements > 0 && fits(piece.begin, piece.elements, unit.elements),
            "unit '{}' has a piece of elements {} + {} of {}", unit.name, piece.begin, piece.elements,
            unit.elements);
    require(spec == nullptr || !spec->scaled || piece.begin % optim::kScaleBlock == 0,
            "unit '{}' has a piece of {} that begins at element {}, inside a block", unit.name,
            piece.component, piece.begin);
    const int64_t file_bytes = bytes_of(range.file);
    require(fits(range.offset, range.bytes, file_bytes), "bytes {} + {} of {}, which has {}", range.offset,
            range.bytes, range.file, file_bytes);
    require(range.bytes >= component_bytes(unit, piece.component, piece.elements),
            "unit '{}': {} bytes of {} for {} elements of {}", unit.name, range.bytes, range.file,
            piece.elements, piece.component);
    const int64_t blocks = (range.bytes - 1) / kBytesPerChecksum + 1;
    require(std::cmp_equal(range.block_checksums.size(), blocks),
            "unit '{}': {} checksums for {} bytes of {}", unit.name, range.block_checksums.size(),
            range.bytes, range.file);
  }

  void require_plain(const std::string& file) const {
    const bool plain =
        !file.empty() && file.size() <= 255 && file != "." && file.find("..") == std::string::npos &&
        file != kManifestFile &&  // what it says of itself changes when it is written again
        std::ranges::none_of(file, [](unsigned char c) { return c == '/' || c == '\\' || c < 0x20; });
    require(plain, "'{}' cannot be a file of this folder", file.substr(0, 64));
  }

  /// The real size; the name is checked before the file system sees it.
  int64_t bytes_of(const std::string& file) {
    if (const auto known = file_bytes_.find(file); known != file_bytes_.end()) return known->second;
    require_plain(file.substr(file.find('/') + 1));  // behind a part's id, which path_of() checks
    const int64_t bytes = CheckpointFile::open(path_of(folder_, file)).bytes();
    file_bytes_.emplace(file, bytes);
    return bytes;
  }

  /// Whether [begin, begin + count) lies in [0, size), without ever forming a sum that could overflow.
  static bool fits(int64_t begin, int64_t count, int64_t size) {
    return begin >= 0 && count >= 0 && begin <= size && count <= size - begin;
  }

  /// A hostile list may be long.
  static fmt::join_view<const int64_t*, const int64_t*> beginning(const std::vector<int64_t>& values) {
    return fmt::join(values.data(), values.data() + std::min<size_t>(values.size(), 8), ", ");
  }

  /// -1 for what no tensor can have.
  static int64_t product(const std::vector<int64_t>& shape) {
    int64_t elements = 1;
    for (const int64_t extent : shape) {
      if (extent < 0 || __builtin_mul_overflow(elements, extent, &elements)) return -1;
    }
    return elements;
  }

  const std::filesystem::path& folder_;
  const Manifest& manifest_;
  std::vector<std::string_view> unit_names_;
  std::vector<std::string_view> parameter_names_;
  std::map<std::string, int64_t, std::less<>> file_bytes_;
};

}  // namespace

std::vector<std::string_view> components_of(const ManifestUnit& unit) {
  if (unit.format == "frozen") {
    return unit.optimizer.empty() ? std::vector<std::string_view>{"hi"} : std::vector<std::string_view>{};
  }
  std::vector<std::string_view> names;
  for (const optim::ComponentSpec& spec : specs_of(unit)) names.push_back(spec.name);
  return names;
}

int64_t component_element_bytes(const ManifestUnit& unit, std::string_view component) {
  if (unit.format == "frozen") return component == "hi" ? dtype_bytes(unit.dtype) : 0;
  const optim::ComponentSpec* spec = component_of(unit, component);
  return spec != nullptr ? spec->element_bytes : 0;
}

int64_t component_bytes(const ManifestUnit& unit, std::string_view component, int64_t elements) {
  const optim::ComponentSpec* spec = component_of(unit, component);
  return spec != nullptr ? spec->bytes(elements) : elements * component_element_bytes(unit, component);
}

void check_manifest_text(const std::filesystem::path& folder, const Manifest& manifest) {
  Check(folder, manifest).text();
}

void check_pieces(const std::filesystem::path& folder, const Manifest& manifest,
                  std::span<const UnitShard> read) {
  Check(folder, manifest).pieces(read);
}

}  // namespace overspill::engine
