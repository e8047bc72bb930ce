#include "engine/checkpoint/taking_over.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/save_folder.h"
#include "io/job_folder.h"
#include "io/owned_folder.h"
#include "io/say.h"
#include "io/slab_share.h"
#include "io/unique_fd.h"

namespace overspill::engine {
namespace {

namespace fs = std::filesystem;

/// The mark of the rank whose files begin with `prefix`; empty where there is none.
std::string mark_in(const fs::path& folder, std::string_view prefix) {
  const io::UniqueFd opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened) return "";
  const std::vector<std::string> marks =
      io::names_in(opened.get(), std::string(prefix) + std::string(io::kMarkPrefix));
  return marks.empty() ? "" : *std::ranges::min_element(marks);
}

/// What one checkpoint has in slabs of the ranks whose part this rank takes.
class LeftCheckpoint {
 public:
  /// Throws CheckpointError.
  LeftCheckpoint(const fs::path& folder, const Setup& setup)
      : folder_(folder), manifest_(read_manifest_text(folder, setup.config.manifest_bytes_max)) {
    const int slice = setup.layout.slice;
    const int slices = setup.layout.slices;
    std::vector<size_t> own;
    for (size_t i = 0; i < manifest_.indexes.size(); ++i) {
      if (!std::cmp_equal(i % static_cast<size_t>(slices), slice)) continue;
      own.push_back(i);
      prefixes_.emplace(rank_prefix(manifest_.indexes[i].file));
    }
    // Version 3 and 2 do not say which rank a piece is of.
    if (manifest_.indexes.empty() && slice > 0) return;
    read_shards(folder, manifest_, own);
    for (const ManifestUnit& unit : manifest_.units) {
      for (const ManifestPiece& piece : unit.pieces) add(piece.range);
    }
  }
  LeftCheckpoint(const LeftCheckpoint&) = delete;
  LeftCheckpoint& operator=(const LeftCheckpoint&) = delete;

  void append_to(std::vector<io::KeptSlabs>& all) const {
    for (const auto& [place, slabs] : places_) all.push_back(slabs);
  }

 private:
  void add(const FileRange& range) {
    const bool in_part = is_in_part(range.file);
    const size_t separator = in_part ? range.file.find('/') : std::string::npos;
    const std::string name = in_part ? range.file.substr(separator + 1) : range.file;
    const std::string_view prefix = rank_prefix(name);
    // Of another rank's slab this one does not know all that is in it.
    if (!in_part && !prefixes_.empty() && !prefixes_.contains(prefix)) return;
    if (!std::string_view(name).substr(prefix.size()).starts_with(io::kSlabPrefix)) return;
    const auto place =
        std::pair(in_part ? range.file.substr(0, separator) : std::string(), std::string(prefix));
    auto found = places_.find(place);
    if (found == places_.end()) {
      const fs::path folder = in_part ? path_of(folder_, range.file).parent_path() : folder_;
      found = places_.emplace(place, io::KeptSlabs{folder, mark_in(folder, prefix), {}}).first;
    }
    found->second.ranges.push_back({name, range.offset, range.bytes, range.block_checksums});
  }

  const fs::path folder_;
  Manifest manifest_;                            // has the checksums
  std::set<std::string, std::less<>> prefixes_;  // of the ranks; none of version 3 and 2
  std::map<std::pair<std::string, std::string>, io::KeptSlabs> places_;  // by part and rank
};

/// One line, however many slabs are left for the same reason.
void say_left(const std::vector<std::string>& left) {
  if (left.empty()) return;
  io::say_on_stderr(
      fmt::format("overspill: warning: the run cannot go on in {} of the files that its checkpoints hold, "
                  "and takes new room in their place. The first: {}",
                  left.size(), left.front()));
}

}  // namespace

std::vector<RankPart::Pinned> take_over(const Setup& setup, io::Store& store) {
  std::deque<LeftCheckpoint> checkpoints;
  std::vector<size_t> checkpoint_of;  // by place
  std::vector<io::KeptSlabs> kept;
  for (const fs::path& folder : setup.config.take_over) {
    try {
      checkpoints.emplace_back(folder, setup).append_to(kept);
    } catch (const CheckpointError& error) {
      io::say_on_stderr(fmt::format("overspill: warning: the run cannot go on in the slabs of {}: {}",
                                    folder.string(), error.what()));
    }
    checkpoint_of.resize(kept.size(), checkpoints.size());
  }
  if (kept.empty()) return {};
  io::TakenOver taken = store.take_over(kept);
  say_left(taken.left);
  std::vector<RankPart::Pinned> pinned;
  size_t last = 0;
  for (size_t i = 0; i < kept.size(); ++i) {
    io::TakenOver::Folder& place = taken.folders[i];
    if (!place.share) continue;
    if (pinned.empty() || checkpoint_of[i] != last) {
      pinned.push_back({.share = place.share, .part_shares = {}, .extents = {}});
    } else {
      pinned.back().part_shares.push_back(*place.share);
    }
    last = checkpoint_of[i];
    std::ranges::copy(place.extents, std::back_inserter(pinned.back().extents));
  }
  return pinned;
}

}  // namespace overspill::engine
