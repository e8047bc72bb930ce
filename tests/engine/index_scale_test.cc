// The manifest and the indexes of 1,024 ranks and two trillion parameters, really written and read. Three of
// the indexes by default: a reader opens what it needs alone. OVERSPILL_LONG=1 writes and reads all, 4 GB.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "engine/checkpoint/index_file.h"
#include "engine/checkpoint/manifest.h"
#include "io/checksum.h"
#include "io/unique_fd.h"
#include "tests/engine/checkpoint_builder.h"

namespace overspill::engine {
namespace {

constexpr int64_t kRanks = 1024;
constexpr int64_t kUnits = 250;
constexpr int64_t kShardElements = 15 * 512 * 1024;
constexpr int64_t kChunk = 512 * 1024;
constexpr int64_t kElements = kRanks * kShardElements;  // of a unit

struct Kind {
  const char* name;
  int64_t bytes;
};
constexpr Kind kKinds[] = {{"hi", 2}, {"lo", 2}, {"m", 4}, {"v", 4}};

std::vector<ManifestUnit> large_units() {
  std::vector<ManifestUnit> units;
  for (int64_t u = 0; u < kUnits; ++u) {
    ManifestUnit unit;
    unit.name = fmt::format("layers.{}", u);
    unit.optimizer = "adam";
    unit.format = "exact";
    for (const Kind& kind : kKinds) unit.components.emplace_back(kind.name);
    unit.dtype = "BF16";
    unit.elements = kElements;
    unit.segments.push_back({.name = unit.name + ".weight",
                             .aliases = {},
                             .shape = {kRanks, kShardElements},
                             .strides = {},
                             .begin = 0,
                             .elements = kElements,
                             .step = 7});
    units.push_back(std::move(unit));
  }
  return units;
}

std::string slab_of(int64_t rank) {
  return fmt::format("rank{}-slab-job-0.bin", rank);
}

/// What a rank writes, in a file that takes no room on the disk.
IndexFile write_rank(const std::filesystem::path& folder, int64_t rank, std::vector<ManifestUnit> units) {
  int64_t offset = 0;
  for (ManifestUnit& unit : units) {
    for (const Kind& kind : kKinds) {
      for (int64_t begin = 0; begin < kShardElements; begin += kChunk) {
        const int64_t bytes = kChunk * kind.bytes;
        std::vector<uint64_t> sums(static_cast<size_t>(io::checksum_blocks(bytes)));
        for (uint64_t& sum : sums)
          sum = static_cast<uint64_t>(offset += io::kChecksumBlockBytes) * 0x9E3779B97F4A7C15U;
        unit.pieces.push_back({kind.name,
                               rank * kShardElements + begin,
                               kChunk,
                               {slab_of(rank), offset - bytes, bytes, std::move(sums)}});
      }
    }
  }
  const io::UniqueFd slab(::open((folder / slab_of(rank)).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  EXPECT_EQ(::ftruncate(slab.get(), offset), 0);
  return write_index(folder, fmt::format("rank{}-{}", rank, kIndexFile), units, {rank, kRanks});
}

TEST(IndexScale, AThousandRanksAndTwoTrillionParameters) {
  const testing::TemporaryFolder folder;
  const bool all = std::getenv("OVERSPILL_LONG") != nullptr;
  Manifest manifest;
  manifest.step = 7;
  manifest.world = kRanks;
  manifest.units = large_units();
  std::set<int64_t> written{0, 511, kRanks - 1};
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    if (all) written.insert(rank);
    manifest.indexes.push_back(
        written.contains(rank)
            ? write_rank(folder.path(), rank, manifest.units)
            : IndexFile{fmt::format("rank{}-{}", rank, kIndexFile), 4 << 20, 1, {rank, kRanks}});
  }
  EXPECT_GT(kUnits * kElements, int64_t{2'000'000'000'000});
  write_manifest_text(folder.path(), manifest);
  EXPECT_LT(std::filesystem::file_size(folder.path() / kManifestFile), 1 << 20);
  for (const int64_t rank : written) {
    Manifest found = read_manifest_text(folder.path());
    read_shards(folder.path(), found, std::vector<size_t>{static_cast<size_t>(rank)});
    ASSERT_EQ(found.units.size(), static_cast<size_t>(kUnits));
    for (const ManifestUnit& unit : found.units) {
      ASSERT_EQ(std::ssize(unit.pieces), 4 * kShardElements / kChunk);
      EXPECT_TRUE(std::ranges::all_of(unit.pieces, [&](const ManifestPiece& piece) {
        return piece.range.file == slab_of(rank) && piece.begin / kShardElements == rank;
      }));
    }
  }
  if (all) return;
  Manifest found = read_manifest_text(folder.path());
  EXPECT_THROW(read_shards(folder.path(), found, std::vector<size_t>{5}), CheckpointError);
}

}  // namespace
}  // namespace overspill::engine
