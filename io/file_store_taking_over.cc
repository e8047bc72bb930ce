// The store goes on in the slabs of an ended run (taking_over.h).
//
// Link counts say who may have a slab: it is taken if the given folders account for all of its names, so that
// no checkpoint which nobody told of, no copy by links, no save that was cut off and no other run has bytes
// in it. Of two runs that take one slab at the same time, at least one sees a name too many, and leaves it.
#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "io/checksum.h"
#include "io/file_store_parts.h"
#include "io/files.h"

namespace overspill::io {

TakenOver Store::take_over(std::span<const KeptSlabs> kept) {
  TakenOver nothing;
  nothing.folders.resize(kept.size());
  return nothing;
}

/// A file of which checkpoints have ranges.
struct FileStore::LeftSlab {
  struct Range {
    int64_t bytes = 0;
    std::span<const uint64_t> checksums;
    std::set<size_t> folders;  // that have it
  };
  struct Name {
    size_t folder;  // whose share stands for it
    std::filesystem::path path;
  };
  FileLook look;
  std::map<std::pair<FileId, std::string>, Name> names;  // by folder: once, however often that is named
  std::map<int64_t, Range> ranges;                       // by offset
  bool agree = true;                                     // all that name a range there mean the same

  const std::filesystem::path& first() const { return names.begin()->second.path; }

  std::string refusal() const {
    if (!look.own_regular) return "it is no file of this user's alone";
    if (look.bytes % kBlockBytes != 0)
      return fmt::format("it has {} bytes, which is no slab's length", look.bytes);
    if (std::cmp_not_equal(look.names, names.size())) {
      return fmt::format(
          "it has {} names (hard links), and {} of them lie in the checkpoints that were named, or found "
          "beside them. Another folder has it too (a copy by links, an unfinished save, a checkpoint that "
          "cannot be "
          "read), or a run that lives: find DISK -samefile FILE finds them",
          look.names, names.size());
    }
    if (!agree) return "its checkpoints name different bytes in one place";
    int64_t end = 0;
    for (const auto& [offset, range] : ranges) {
      const bool aligned = offset % kBlockBytes == 0 && range.bytes % kBlockBytes == 0;
      if (!aligned || range.bytes <= 0 || offset < end || range.bytes > look.bytes - offset ||
          std::ssize(range.checksums) != checksum_blocks(range.bytes)) {
        return fmt::format("the {} bytes at {} are no extent", range.bytes, offset);
      }
      end = offset + range.bytes;
    }
    return "";
  }
};

namespace {

/// For each, the first that has the same mark: a folder that is named twice, by whatever path, and copies by
/// hard links have one share, since its life is the mark's.
std::vector<size_t> by_mark(std::span<const KeptSlabs> kept) {
  std::vector<size_t> first(kept.size());
  std::map<FileId, size_t> known;
  for (size_t i = 0; i < kept.size(); ++i) {
    const auto mark = kept[i].mark.empty() ? std::nullopt : look_at(kept[i].folder / kept[i].mark);
    first[i] = mark ? known.emplace(mark->id, i).first->second : i;
  }
  return first;
}

}  // namespace

std::map<FileId, FileStore::LeftSlab> FileStore::left_slabs(std::span<const KeptSlabs> kept) {
  std::map<FileId, LeftSlab> slabs;
  const std::vector<size_t> share = by_mark(kept);
  for (size_t i = 0; i < kept.size(); ++i) {
    std::error_code unreadable;
    const auto folder = look_at(std::filesystem::canonical(kept[i].folder, unreadable));
    if (unreadable || !folder) continue;
    std::map<std::string, LeftSlab*> by_name;
    for (const KeptRange& range : kept[i].ranges) {
      auto [known, is_new] = by_name.emplace(range.file, nullptr);
      if (is_new) {
        const std::filesystem::path path = kept[i].folder / range.file;
        if (const auto look = look_at(path)) {
          LeftSlab& slab = slabs[look->id];
          slab.look = *look;
          slab.names.emplace(std::pair(folder->id, range.file), LeftSlab::Name{share[i], path});
          known->second = &slab;
        }
      }
      if (known->second == nullptr) continue;  // it is not there: loading the checkpoint says so
      auto [found, first] = known->second->ranges.try_emplace(range.offset);
      if (first) {
        found->second.bytes = range.bytes;
        found->second.checksums = range.checksums;
      }
      found->second.folders.insert(share[i]);
      known->second->agree = known->second->agree && found->second.bytes == range.bytes &&
                             std::ranges::equal(found->second.checksums, range.checksums);
    }
  }
  return slabs;
}

std::optional<size_t> FileStore::lane_on(uint64_t device) const {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const auto look = look_at(lanes_[i].folder.path());
    if (look && look->id.device == device) return i;
  }
  return std::nullopt;
}

TakenOver FileStore::take_over(std::span<const KeptSlabs> kept) {
  TakenOver taken;
  taken.folders.resize(kept.size());
  const MutexLock lock(grow_mutex_);
  // After a power cut a folder whose removal is not on the disk would be there again, with bytes that were
  // given to others: link counts mean nothing before.
  for (const Lane& lane : lanes_) {
    const UniqueFd folder(::open(lane.folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder || sync_file_system(watch_.get(), folder.get(), lane.path) != 0) {
      taken.left.push_back(fmt::format("{}: its file system cannot be synced", lane.path));
      return taken;
    }
  }
  for (auto& [id, slab] : left_slabs(kept)) {
    std::string why = slab.refusal();
    if (why.empty()) {
      try {
        take_slab(slab, id, kept, taken);
      } catch (const StoreError& error) {
        if (error.error().kind == ErrorKind::stalled) throw;
        why = error.error().cause();
      }
    }
    if (!why.empty()) taken.left.push_back(fmt::format("{}: {}", slab.first().string(), why));
  }
  for (TakenOver::Folder& folder : taken.folders) {
    if (folder.share && folder.extents.empty()) shares_.end(*std::exchange(folder.share, std::nullopt));
  }
  return taken;
}

void FileStore::take_slab(LeftSlab& slab, const FileId& id, std::span<const KeptSlabs> kept,
                          TakenOver& taken) {
  const std::filesystem::path& outside = slab.first();
  const auto lane = lane_on(id.device);
  if (!lane) {
    throw StoreError({.kind = ErrorKind::unsupported,
                      .operation = Operation::link,
                      .path = outside.string(),
                      .detail = "it lies on none of the run's NVMe folders' file systems"});
  }
  // Without its mark a folder could go, or be copied, and nobody would notice.
  for (const auto& [place, name] : slab.names) share_of(kept[name.folder], taken.folders[name.folder], *lane);
  const auto number = static_cast<uint32_t>(slab_count());
  SlabFile file = lanes_[*lane].folder.link_slab(number, outside, id, std::ssize(slab.names), watch_.get());
  const int64_t bytes = file.bytes;
  lanes_[*lane].reserved_bytes += bytes;
  taken.slab_bytes += bytes;
  {
    const MutexLock slabs_lock(slabs_mutex_);
    space_.add_slab(static_cast<int>(*lane), bytes);
    slabs_.push_back({std::move(file), *lane});
    for (const auto& [place, name] : slab.names)
      shares_.add(*taken.folders[name.folder].share, slabs_.back().file, name.path);
  }
  for (const auto& [offset, range] : slab.ranges) {
    const Extent extent =
        space_.occupy(number, offset, range.bytes, range.checksums, static_cast<int>(range.folders.size()));
    for (const size_t folder : range.folders) taken.folders[folder].extents.push_back(extent);
  }
}

uint64_t FileStore::share_of(const KeptSlabs& kept, TakenOver::Folder& folder, size_t lane) {
  if (!folder.share) folder.share = shares_.take_up(kept.folder / kept.mark, lanes_[lane].folder.path());
  return *folder.share;
}

std::optional<Extent> FileStore::own_extent(const std::filesystem::path& file, int64_t offset, int64_t bytes,
                                            std::span<const uint64_t> checksums) const {
  const auto look = look_at(file);
  if (!look) return std::nullopt;
  const ReaderLock lock(slabs_mutex_);
  const auto slab = std::ranges::find(slabs_, look->id, [](const Slab& each) { return each.file.id; });
  if (slab == slabs_.end()) return std::nullopt;
  return space_.written_at(static_cast<uint32_t>(slab - slabs_.begin()), offset, bytes, checksums);
}

}  // namespace overspill::io
