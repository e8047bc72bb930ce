#include "engine/checkpoint/index_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/checkpoint_file.h"
#include "io/checksum.h"
#include "io/error.h"

namespace overspill::engine {
namespace {

static_assert(std::endian::native == std::endian::little, "the index is little-endian");

constexpr std::array<char, 8> kMagic{'O', 'V', 'S', 'P', 'I', 'D', 'X', '1'};
constexpr size_t kNameMax = 255;  // of Linux, bytes

struct IndexHead {
  std::array<char, 8> magic = kMagic;
  uint64_t files = 0;
  uint64_t name_bytes = 0;  // of all names, with what fills them up
  uint64_t pieces = 0;
  uint64_t checksums = 0;
};
static_assert(sizeof(IndexHead) == 40);

struct IndexPiece {
  uint32_t unit = 0;
  uint32_t component = 0;  // of the unit's
  uint64_t file = 0;
  int64_t begin = 0;
  int64_t elements = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
};
static_assert(sizeof(IndexPiece) == 48);

constexpr size_t fill(size_t bytes) {
  return (8 - bytes % 8) % 8;
}

/// Collects the bytes of an index.
class IndexWriter {
 public:
  explicit IndexWriter(const std::vector<ManifestUnit>& units) {
    for (size_t u = 0; u < units.size(); ++u) {
      for (const ManifestPiece& piece : units[u].pieces) add(static_cast<uint32_t>(u), units[u], piece);
    }
  }

  std::vector<std::byte> take() {
    names_.resize(names_.size() + fill(names_.size()));
    const IndexHead head{.files = numbers_.size(),
                         .name_bytes = names_.size(),
                         .pieces = pieces_.size(),
                         .checksums = checksums_.size()};
    std::vector<std::byte> bytes;
    bytes.reserve(sizeof head + names_.size() + std::as_bytes(std::span(pieces_)).size() +
                  std::as_bytes(std::span(checksums_)).size());
    append(bytes, std::as_bytes(std::span(&head, 1)));
    append(bytes, names_);
    append(bytes, std::as_bytes(std::span(pieces_)));
    append(bytes, std::as_bytes(std::span(checksums_)));
    return bytes;
  }

 private:
  static void append(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
    to.insert(to.end(), bytes.begin(), bytes.end());
  }

  void add(uint32_t unit, const ManifestUnit& described, const ManifestPiece& piece) {
    const auto component = std::ranges::find(described.components, piece.component);
    pieces_.push_back({.unit = unit,
                       .component = static_cast<uint32_t>(component - described.components.begin()),
                       .file = number_of(piece.range.file),
                       .begin = piece.begin,
                       .elements = piece.elements,
                       .offset = piece.range.offset,
                       .bytes = piece.range.bytes});
    const auto& sums = piece.range.block_checksums;
    checksums_.insert(checksums_.end(), sums.begin(), sums.end());
  }

  uint64_t number_of(const std::string& file) {
    const auto [found, is_new] = numbers_.emplace(file, numbers_.size());
    if (is_new) {
      const auto length = static_cast<uint16_t>(file.size());
      append(names_, std::as_bytes(std::span(&length, 1)));
      append(names_, std::as_bytes(std::span(file)));
    }
    return found->second;
  }

  std::map<std::string, uint64_t> numbers_;
  std::vector<std::byte> names_;
  std::vector<IndexPiece> pieces_;
  std::vector<uint64_t> checksums_;
};

/// Takes the bytes of an index apart. No number in them is believed before it is compared with what is there.
class IndexReader {
 public:
  IndexReader(std::filesystem::path path, std::span<const std::byte> bytes)
      : path_(std::move(path)), bytes_(bytes) {}

  void read(Manifest& to) {
    const auto head = value<IndexHead>(0);
    require(head.magic == kMagic, "it does not begin as an index does");
    // Each count is compared alone first: their sum cannot overflow then.
    require(head.files <= bytes_.size() && head.name_bytes <= bytes_.size() &&
                head.pieces <= bytes_.size() / sizeof(IndexPiece) &&
                head.checksums <= bytes_.size() / sizeof(uint64_t) && head.name_bytes % 8 == 0 &&
                sizeof head + head.name_bytes + head.pieces * sizeof(IndexPiece) +
                        head.checksums * sizeof(uint64_t) ==
                    bytes_.size(),
            "its counts do not fit its length");
    const std::vector<std::string> files = names(bytes_.subspan(sizeof head, head.name_bytes), head.files);
    const size_t first_piece = sizeof head + head.name_bytes;
    const size_t first_sum = first_piece + head.pieces * sizeof(IndexPiece);
    uint64_t sum = 0;
    for (uint64_t i = 0; i < head.pieces; ++i) {
      const auto piece = value<IndexPiece>(first_piece + i * sizeof(IndexPiece));
      require(piece.unit < to.units.size() && piece.component < to.units[piece.unit].components.size() &&
                  piece.file < files.size() && piece.bytes >= 0,
              "one of its pieces belongs to nothing");
      // Not checksum_blocks(), which could overflow.
      const auto blocks =
          piece.bytes == 0 ? 0 : (static_cast<uint64_t>(piece.bytes) - 1) / io::kChecksumBlockBytes + 1;
      require(blocks <= head.checksums - sum, "it has too few checksums");
      ManifestUnit& unit = to.units[piece.unit];
      std::vector<uint64_t> sums(blocks);
      if (blocks > 0)
        std::memcpy(sums.data(), bytes_.data() + first_sum + sum * sizeof(uint64_t),
                    blocks * sizeof(uint64_t));
      sum += blocks;
      unit.pieces.push_back({unit.components[piece.component],
                             piece.begin,
                             piece.elements,
                             {files[piece.file], piece.offset, piece.bytes, std::move(sums)}});
    }
    require(sum == head.checksums, "it has checksums of nothing");
  }

 private:
  void require(bool holds, const char* what) const {
    if (holds) return;
    throw CheckpointError(fmt::format("{}: {}; the checkpoint is damaged or was edited, use another one",
                                      path_.string(), what));
  }

  template <class Value>
  Value value(size_t at) const {
    require(bytes_.size() >= sizeof(Value) && at <= bytes_.size() - sizeof(Value), "it ends too early");
    Value read;
    std::memcpy(&read, bytes_.data() + at, sizeof read);
    return read;
  }

  std::vector<std::string> names(std::span<const std::byte> bytes, uint64_t count) const {
    std::vector<std::string> files;
    for (uint64_t i = 0; i < count; ++i) {
      uint16_t length = 0;
      require(bytes.size() >= sizeof length, "its names end too early");
      std::memcpy(&length, bytes.data(), sizeof length);
      bytes = bytes.subspan(sizeof length);
      require(length <= kNameMax && length <= bytes.size(), "its names end too early");
      files.emplace_back(reinterpret_cast<const char*>(bytes.data()), length);
      bytes = bytes.subspan(length);
    }
    require(bytes.size() < 8, "it has names of nothing");
    return files;
  }

  std::filesystem::path path_;
  std::span<const std::byte> bytes_;
};

std::vector<std::byte> read_whole(const std::filesystem::path& path, int64_t bytes_max) {
  const CheckpointFile file = CheckpointFile::open(path);
  const int64_t bytes = file.bytes();
  if (bytes > bytes_max) {
    throw CheckpointError(fmt::format("{}: it has {} bytes, more than any index ({}); use another checkpoint",
                                      path.string(), bytes, bytes_max));
  }
  std::vector<std::byte> all(static_cast<size_t>(bytes));
  file.read_at(all, 0);
  return all;
}

}  // namespace

int64_t index_bytes(int64_t pieces, int64_t checksums) {
  return static_cast<int64_t>(sizeof(IndexHead)) + pieces * static_cast<int64_t>(sizeof(IndexPiece)) +
         checksums * static_cast<int64_t>(sizeof(uint64_t));
}

IndexFile write_index(const std::filesystem::path& folder, const std::string& file,
                      const std::vector<ManifestUnit>& units, const UnitShard& shard, int64_t bytes_max,
                      io::StallWatch* watch) {
  const std::vector<std::byte> bytes = IndexWriter(units).take();
  if (std::ssize(bytes) > bytes_max) {
    throw CheckpointError(
        fmt::format("{}: would have {} bytes, and no reader takes more than {}: this rank has too many "
                    "parameters for one "
                    "checkpoint; train with more ranks, or fewer parameters in one engine",
                    (folder / file).string(), bytes.size(), bytes_max));
  }
  const std::filesystem::path temporary = folder / (file + ".tmp");  // kUnfinishedIndexFile, of this rank
  std::error_code ignored;
  std::filesystem::remove(temporary, ignored);  // of a save that was cut off
  try {
    CheckpointFile out = CheckpointFile::create(temporary, 0600);
    out.write(bytes);
    out.sync(watch);
    rename_file(temporary, folder / file);
  } catch (...) {
    if (!io::is_stalled(std::current_exception())) std::filesystem::remove(temporary, ignored);
    throw;
  }
  return {file, std::ssize(bytes), io::checksum_block(bytes), shard};
}

void read_index(const std::filesystem::path& folder, const IndexFile& index, Manifest& to) {
  const std::filesystem::path path = folder / index.file;
  const std::vector<std::byte> bytes = read_whole(path, std::min(index.bytes, kIndexBytesMax));
  const uint64_t found = io::checksum_block(bytes);
  if (std::ssize(bytes) != index.bytes || found != index.checksum) {
    throw CheckpointError(fmt::format(
        "{}: its {} bytes have the checksum {:016x}, and the manifest says {} bytes, {:016x}: damaged or of "
        "another save; use another checkpoint",
        path.string(), bytes.size(), found, index.bytes, index.checksum));
  }
  IndexReader(path, bytes).read(to);
}

}  // namespace overspill::engine
