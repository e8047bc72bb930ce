#include "engine/checkpoint/keeper.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "engine/checkpoint/checkpoint_file.h"
#include "engine/checkpoint/index_file.h"
#include "engine/checkpoint/manifest_check.h"
#include "engine/checkpoint/manifest_unit.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/checkpoint/taking_over.h"
#include "io/files.h"
#include "io/part_folder.h"
#include "io/say.h"
#include "io/stall_watch.h"

namespace overspill::engine {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const fs::path& path, const char* what, const std::error_code& error) {
  throw CheckpointError(fmt::format("{}: {}: {}; check the disk, free space or choose another folder",
                                    path.string(), what, error.message()));
}

bool is_there(const fs::path& path) {
  std::error_code error;
  const bool found = fs::exists(path, error);
  if (error) fail(path, "cannot be examined", error);
  return found;
}

/// Creates `folder` and the folders above it that are missing, and makes their names durable.
void create_durably(const fs::path& folder, io::StallWatch* watch) {
  if (is_there(folder)) return;
  const fs::path parent = folder.parent_path();
  create_durably(parent, watch);
  make_folder(folder);
  engine::sync_folder(parent, watch);
}

/// Absolute, and without a trailing separator: "<folder>.partial" has to lie beside the folder, not in it.
fs::path whole_name(const fs::path& folder) {
  const fs::path absolute = fs::absolute(folder).lexically_normal();
  return absolute.has_filename() ? absolute : absolute.parent_path();
}

fs::path partial_name(const fs::path& folder) {
  return whole_name(folder).string() + ".partial";
}

void require_absent(const fs::path& folder) {
  if (!is_there(folder)) return;
  std::error_code error;
  if (fs::is_directory(folder, error) && fs::is_empty(folder, error)) {
    fs::remove(folder, error);
    if (error) fail(folder, "the empty folder there cannot be replaced", error);
    return;
  }
  throw CheckpointError(
      fmt::format("{} exists already and is not empty: a checkpoint needs a new folder", folder.string()));
}

/// Of a folder whose disk does not answer, so that no reader takes it for a checkpoint. Waits as long as the
/// watch allows.
void remove_manifest(io::StallWatch* watch, int folder, const fs::path& path) {
  const auto remove = [](int file) { return ::unlinkat(file, kManifestFile, 0) == 0 ? 0 : errno; };
  try {
    io::watched(watch, io::Operation::remove, folder, (path / kManifestFile).string(), remove);
  } catch (const io::StoreError&) {
  }
}

/// A locked folder. It is unlocked by name: a forked child may have the descriptor, too, and keep it open.
class HeldFolder {
 public:
  explicit HeldFolder(io::UniqueFd folder) : folder_(std::move(folder)) {}
  HeldFolder(const HeldFolder&) = delete;
  HeldFolder& operator=(const HeldFolder&) = delete;
  ~HeldFolder() {
    if (folder_) ::flock(folder_.get(), LOCK_UN);
  }
  int get() const { return folder_.get(); }

 private:
  io::UniqueFd folder_;
};

/// After an error, which says more.
void remove_quietly(const fs::path& save) noexcept {
  try {
    remove_save(save);
  } catch (const std::exception&) {
  }
}

}  // namespace

CheckpointKeeper::CheckpointKeeper(const Setup& setup, Core& core, ModelStates& model, Access& access)
    : setup_(setup), core_(core), model_(model), access_(access) {
  try {
    if (const std::string why = too_large(); !why.empty())
      io::say_on_stderr("overspill: warning: no checkpoint of this model can be saved: " + why);
  } catch (const CheckpointError&) {  // of a name that no manifest takes: a save says so
  }
}

/// Empty, or the numbers. Rank 0 writes the text.
std::string CheckpointKeeper::too_large() const {
  const int64_t most = setup_.config.manifest_bytes_max;
  const auto refuse = [most](const char* what, int64_t bytes) {
    return fmt::format(
        "{} may have {} bytes, and no reader takes more than {}; train fewer parameters in one "
        "engine",
        what, bytes, most);
  };
  if (const int64_t bytes = manifest_bytes(setup_); bytes > most && setup_.layout.slice == 0)
    return refuse("its manifest", bytes);
  if (const int64_t bytes = index_bytes(setup_); bytes > most)
    return refuse("the index of its pieces", bytes);
  return "";
}

void CheckpointKeeper::forget_deleted() {
  std::erase_if(kept_, [&](const RankPart::Pinned& kept) {
    const auto lives = [this](uint64_t share) { return core_.store->share_lives(share); };
    if (lives(*kept.share) || std::ranges::any_of(kept.part_shares, lives)) return false;
    unpin(kept);
    return true;
  });
}

int64_t CheckpointKeeper::pinned_bytes() const {
  int64_t bytes = 0;
  for (const RankPart::Pinned& kept : kept_) {
    for (const io::Extent& extent : kept.extents) bytes += extent.bytes;
  }
  return bytes;
}

/// Of the store, with checkpoints beyond those that the plan has room for.
int64_t CheckpointKeeper::room_bytes() const {
  const int64_t planned = setup_.config.checkpoints_kept * setup_.plan.kept_nvme_bytes();
  const int64_t beyond = setup_.config.train_after_save ? pinned_bytes() - planned : 0;
  return setup_.plan.nvme_reserve_bytes + std::max<int64_t>(0, beyond);
}

void CheckpointKeeper::take_room() {
  if (!core_.store.exists()) return;
  // Without train_after_save a checkpoint holds the states' only room.
  if (setup_.config.train_after_save) kept_ = take_over(setup_, *core_.store);
  core_.store.reserve(room_bytes());
}

void CheckpointKeeper::require_room_to_change() {
  if (setup_.config.train_after_save) return;
  forget_deleted();
  if (kept_.empty()) return;
  const MutexLock guard(core_.mutex());
  throw CheckpointError(
      fmt::format("the states' only room on NVMe is held by the checkpoint {}: with train_after_save = false "
                  "nothing changes after a save. Delete the checkpoint to go on, or set train_after_save, "
                  "which reserves {} bytes more",
                  core_.last_checkpoint, setup_.plan.kept_nvme_bytes()));
}

/// And ends the shares that its extents were pinned for.
void CheckpointKeeper::unpin(const RankPart::Pinned& pinned) noexcept {
  for (const io::Extent& extent : pinned.extents) core_.store->unpin(extent);
  if (pinned.share) core_.store->end_share(*pinned.share);
  for (const uint64_t share : pinned.part_shares) core_.store->end_share(share);
}

/// Of this rank's folder while it writes; before the names of its files in the checkpoint.
std::string CheckpointKeeper::rank_name() const {
  return fmt::format("rank{}", setup_.layout.slice);
}

fs::path CheckpointKeeper::unfinished(const fs::path& folder) {
  return partial_name(folder);
}

void CheckpointKeeper::prepare(const fs::path& folder) {
  if (const std::string why = too_large(); !why.empty())
    throw CheckpointError(fmt::format("{} cannot be saved: {}", whole_name(folder).string(), why));
  const fs::path partial = partial_name(folder);
  require_only_a_save(partial);  // first: a refusal changes nothing
  require_absent(whole_name(folder));
  if (const io::UniqueFd left = hold_save(partial)) remove_save(partial);
  try {
    create_durably(partial, core_.store.watch());
    saving_folder_ = hold_save(partial);
    if (!saving_folder_)
      throw CheckpointError(fmt::format("{} was removed while it was made", partial.string()));
  } catch (const SaveUnderWay&) {
    throw;
  } catch (...) {
    if (io::is_stalled(std::current_exception())) throw;
    remove(folder);  // it may have been made before its own name failed to become durable
    throw;
  }
}

RankPart& CheckpointKeeper::begin_part(const fs::path& folder) {
  forget_deleted();
  if (core_.store.exists()) core_.store.reserve(room_bytes());
  const fs::path own = own_folder(folder);
  if (own != partial_name(folder)) make_folder(own);
  return part_.emplace(setup_, core_, model_, access_, meter_, own);
}

/// Files of several ranks may have one name: each writes into a folder of its own, then moves them.
fs::path CheckpointKeeper::own_folder(const fs::path& folder) const {
  const fs::path partial = partial_name(folder);
  return setup_.layout.slices == 1 ? partial : partial / rank_name();
}

WrittenPart CheckpointKeeper::finish_part(const fs::path& folder) {
  const fs::path partial = partial_name(folder);
  WrittenPart part{part_->finish(), std::nullopt};
  std::string prefix;
  if (setup_.layout.slices > 1) {
    prefix = rank_name() + "-";
    move_up(partial, prefix);
    for (ManifestUnit& unit : part.units) {
      for (ManifestPiece& piece : unit.pieces) {
        if (!is_in_part(piece.range.file)) piece.range.file = prefix + piece.range.file;
      }
    }
  }
  if (part_->has_pieces()) {
    const UnitShard shard{setup_.layout.shard, setup_.layout.shards};
    part.index = write_index(partial, prefix + kIndexFile, part.units, shard,
                             setup_.config.manifest_bytes_max, core_.store.watch());
  }
  engine::sync_folder(partial, core_.store.watch());
  for (ManifestUnit& unit : part.units) unit.pieces = {};
  return part;
}

void CheckpointKeeper::move_up(const fs::path& partial, const std::string& prefix) const {
  const fs::path own = partial / rank_name();
  for (const auto& entry : fs::directory_iterator(own)) {
    const std::string name = entry.path().filename().string();
    // The name of a part has its id, by which it is found.
    rename_file(entry.path(), partial / (name.starts_with(io::kPartPrefix) ? name : prefix + name));
  }
  if (::rmdir(own.c_str()) != 0) fail(own, "cannot be removed", {errno, std::generic_category()});
}

void CheckpointKeeper::complete(const fs::path& folder, const Manifest& manifest) {
  const fs::path absolute = whole_name(folder);
  const fs::path partial = partial_name(folder);
  const int held = saving_folder_.get();
  if (!io::same_file(held, partial)) {
    throw CheckpointError(
        fmt::format("{} is another folder than the one that this save made: it was removed or replaced "
                    "meanwhile; save again",
                    partial.string()));
  }
  write_manifest_text(partial, manifest, setup_.config.manifest_bytes_max, core_.store.watch());
  rename_file(partial, absolute);
  try {
    engine::sync_folder(absolute.parent_path(), core_.store.watch());
  } catch (...) {
    if (io::is_stalled(std::current_exception())) {
      remove_manifest(core_.store.watch(), held, absolute);
      throw;
    }
    ::unlink((absolute / kManifestFile).c_str());  // whatever stops the rest, this is no checkpoint
    remove_quietly(absolute);
    throw;
  }
}

void CheckpointKeeper::keep(const fs::path& folder) {
  const HeldFolder held(std::move(saving_folder_));
  RankPart::Pinned pinned = end_part();
  if (pinned.share) {
    core_.store->share_named(*pinned.share, whole_name(folder),
                             setup_.layout.slices == 1 ? "" : rank_name() + "-");
    if (!pinned.part_shares.empty()) io::note_owner(whole_name(folder));
    kept_.push_back(std::move(pinned));
  }
  const MutexLock guard(core_.mutex());
  core_.last_checkpoint = whole_name(folder).string();
}

RankPart::Pinned CheckpointKeeper::end_part() {
  if (!part_) return {};
  RankPart::Pinned pinned = part_->give_pins();
  part_.reset();
  return pinned;
}

void CheckpointKeeper::remove(const fs::path& folder) const noexcept {
  // Another save may have this name by now.
  if (saving_folder_ && !io::same_file(saving_folder_.get(), partial_name(folder))) return;
  remove_quietly(partial_name(folder));
}

void CheckpointKeeper::give_up() noexcept {
  const HeldFolder held(std::move(saving_folder_));
  unpin(end_part());
}

void CheckpointKeeper::leave() {
  const HeldFolder held(std::move(saving_folder_));
  RankPart::Pinned pinned = end_part();
  if (pinned.share) {
    kept_.push_back(std::move(pinned));
  } else {
    unpin(pinned);
  }
}

Manifest CheckpointKeeper::open(const fs::path& folder) const {
  io::StallWatch::Progress progress(core_.store.watch(), io::Operation::read, folder.string());
  Manifest manifest = read_manifest_text(folder);
  progress.moved();
  std::map<std::string, const ManifestUnit*> by_name;
  for (const ManifestUnit& unit : manifest.units) by_name.emplace(unit.name, &unit);
  for (const Unit& own : setup_.layout.units) {
    const auto found = by_name.find(own.name);
    if (found == by_name.end()) {
      throw CheckpointError(
          fmt::format("{} is a checkpoint of another model: it has no unit {}", folder.string(), own.name));
    }
    match(folder, *found->second, own);
  }
  if (manifest.units.size() != setup_.layout.units.size()) {
    throw CheckpointError(fmt::format("{} is a checkpoint of another model: it has {} units, this one {}",
                                      folder.string(), manifest.units.size(), setup_.layout.units.size()));
  }
  read_shards(folder, manifest, needed(manifest));
  drop_others(manifest);
  return manifest;
}

void CheckpointKeeper::verify(const fs::path& folder, const Manifest& manifest) const {
  io::StallWatch::Progress progress(core_.store.watch(), io::Operation::read, folder.string());
  verify_data(
      CheckpointReader(folder, CheckpointReader::Through::page_cache), manifest,
      [](void* progress, int64_t, int64_t) { static_cast<io::StallWatch::Progress*>(progress)->moved(); },
      &progress);
}

/// The indexes that have elements of this rank's shard: no other file of other ranks is opened.
std::vector<size_t> CheckpointKeeper::needed(const Manifest& manifest) const {
  std::vector<size_t> indexes;
  for (size_t i = 0; i < manifest.indexes.size(); ++i) {
    const UnitShard& shard = manifest.indexes[i].shard;
    const bool has_some = std::ranges::any_of(manifest.units, [&](const ManifestUnit& unit) {
      const int64_t elements = unit.elements / shard.of;
      const ManifestPiece all{
          .component = "", .begin = elements * shard.number, .elements = elements, .range = {}};
      return overlap(setup_.layout.units[index_of(unit.name)], all).elements > 0;
    });
    if (has_some) indexes.push_back(i);
  }
  return indexes;
}

/// Leaves the pieces in which this rank has elements.
void CheckpointKeeper::drop_others(Manifest& manifest) const {
  for (ManifestUnit& unit : manifest.units) {
    const Unit& own = setup_.layout.units[index_of(unit.name)];
    std::erase_if(unit.pieces, [&](const ManifestPiece& piece) { return overlap(own, piece).elements <= 0; });
  }
}

int32_t CheckpointKeeper::index_of(const std::string& unit) const {
  const auto& units = setup_.layout.units;
  const auto found =
      std::find_if(units.begin(), units.end(), [&](const Unit& own) { return own.name == unit; });
  return static_cast<int32_t>(found - units.begin());
}

/// Padding depends on the world the checkpoint was made in; what lies beyond this unit's own is zero.
CheckpointKeeper::Overlap CheckpointKeeper::overlap(const Unit& own, const ManifestPiece& piece) const {
  const int64_t shard = setup_.layout.shard * own.shard_elements;
  const int64_t begin = std::max(piece.begin, shard);
  const int64_t end = std::min(piece.begin + piece.elements, shard + own.shard_elements);
  return {begin - shard, begin - piece.begin, end - begin};
}

void CheckpointKeeper::count_steps(int32_t unit, const ManifestUnit& found) {
  const MutexLock lock(core_.mutex());
  for (size_t s = 0; s < found.segments.size(); ++s) model_.units[unit].steps[s] = found.segments[s].step;
}

/// Nothing where its bytes have to be copied.
std::optional<CheckpointKeeper::TakenPiece> CheckpointKeeper::taken_piece(const fs::path& folder,
                                                                          const RestoredPiece& piece) const {
  const FileRange& range = piece.piece->range;
  if (!core_.store.exists() || piece.in_piece != 0 || piece.elements != piece.piece->elements) return {};
  const Unit& u = setup_.layout.units[piece.unit];
  const Component component{static_cast<uint8_t>(u.component_named(piece.piece->component))};
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    const Chunk& chunk = setup_.layout.chunks[c];
    if (chunk.begin != piece.in_shard) continue;
    if (chunk.elements != piece.elements || !setup_.in_store(c, component) ||
        range.bytes != io::round_up_to_block(setup_.component_bytes(c, component)))
      return {};
    const auto extent = core_.store->own_extent(path_of(folder, range.file), range.offset, range.bytes,
                                                range.block_checksums);
    if (!extent) return {};
    return TakenPiece{piece, c, component, *extent};
  }
  return {};
}

void CheckpointKeeper::load(const fs::path& folder, const Manifest& manifest, Loading loading) {
  std::vector<RestoredPiece> restored;
  std::vector<TakenPiece> taken;
  for (const ManifestUnit& found : manifest.units) {
    const int32_t index = index_of(found.name);
    const Unit& unit = setup_.layout.units[index];
    count_steps(index, found);
    for (const ManifestPiece& piece : found.pieces) {
      const Overlap own = overlap(unit, piece);
      const RestoredPiece wanted{index, &found, &piece, own.in_shard, own.in_piece, own.elements};
      if (std::optional<TakenPiece> in_place = taken_piece(folder, wanted)) {
        taken.push_back(*in_place);
      } else {
        restored.push_back(wanted);
      }
    }
  }
  // Past the page cache what is read once. At stage 0 all ranks of a machine read the same bytes.
  const bool again = loading == Loading::verified || (setup_.layout.shards == 1 && setup_.layout.slices > 1);
  using Through = CheckpointReader::Through;
  const CheckpointReader files(folder, again ? Through::page_cache : Through::nothing);
  io::StallWatch::Progress progress(core_.store.watch(), io::Operation::read, folder.string());
  const auto report = [&](int64_t) { progress.moved(); };
  if (loading == Loading::unread) {  // nobody has compared what is taken
    std::vector<const FileRange*> ranges;
    for (const TakenPiece& piece : taken) ranges.push_back(&piece.piece.piece->range);
    verify_ranges(files, ranges, report);
  }
  for (const TakenPiece& piece : taken) {
    if (!access_.take(piece.chunk, piece.component, piece.extent)) restored.push_back(piece.piece);
  }
  restore_pieces(files, setup_, access_, restored, report);
}

}  // namespace overspill::engine
