#include "io/file_store.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>

#include "io/backend.h"
#include "io/job_folder.h"
#include "io/piece_queue.h"
#include "io/slab_export.h"
#include "io/store_base.h"

namespace overspill::io {
namespace {

// One reservation makes about this many slabs at most: each is an open file.
constexpr int64_t kSlabsPerReservation = 64;

StoreError invalid(Operation operation, std::string detail) {
  return StoreError({.kind = ErrorKind::invalid, .operation = operation, .detail = std::move(detail)});
}

class FileStore final : public StoreBase<Store> {
 public:
  explicit FileStore(const FileStoreOptions& options);
  ~FileStore() override;

  void reserve(int64_t bytes) override;
  Extent allocate(int64_t bytes) override;
  std::vector<ExportedExtent> export_extents(std::span<const Extent> extents,
                                             const std::filesystem::path& folder) override;
  void register_memory(std::span<std::byte> memory) override;
  void unregister_memory(std::span<std::byte> memory) override;
  StoreStats stats() const override;

 private:
  // What works on one path.
  struct Lane {
    Lane(FileStore& store, const std::filesystem::path& path, const FileStoreOptions& options)
        : folder(path, options.job, options.direct),
          queue(store, options.queue_depth, options.piece_bytes, options.result_hook) {}

    JobFolder folder;
    PieceQueue queue;
    std::unique_ptr<Backend> backend;
    int64_t reserved_bytes = 0;  // guarded by grow_mutex_
  };
  struct Slab {
    SlabFile file;
    Lane* lane;
  };

  void enqueue(Transfer& transfer) override;
  Target locate(const Transfer& transfer) override;
  std::string path_of(const Target& target) override;

  Lane& lane_of(const Extent& extent);
  Lane& lane_for_slab(int64_t bytes);
  void grow(int64_t bytes, int64_t least_slab_bytes);
  void stop();

  const std::string job_;
  const int64_t slab_bytes_;
  const bool wants_direct_;

  std::deque<Lane> lanes_;

  std::mutex grow_mutex_;                  // taken before the others
  mutable std::shared_mutex slabs_mutex_;  // guards the table, which only grows; its entries never move
  std::deque<Slab> slabs_;
};

std::unique_ptr<Backend> make_backend(PieceQueue& queue, const FileStoreOptions& options) {
  using Choice = FileStoreOptions::Backend;
  std::string refusal;
  if (options.backend != Choice::threads) {
    if (auto backend = make_uring_backend(queue, refusal)) return backend;
    if (options.backend == Choice::uring) {
      throw StoreError({.kind = ErrorKind::unsupported, .operation = Operation::open, .detail = refusal});
    }
  }
  return make_thread_backend(queue, std::clamp(options.threads, 1, options.queue_depth), refusal);
}

FileStore::FileStore(const FileStoreOptions& options)
    : job_(options.job), slab_bytes_(round_up_to_block(options.slab_bytes)), wants_direct_(options.direct) {
  if (options.paths.empty()) throw invalid(Operation::open, "no path was given");
  if (options.slab_bytes <= 0)
    throw invalid(Operation::open, fmt::format("slabs of {} bytes", options.slab_bytes));
  try {
    for (const auto& path : options.paths) {
      Lane& lane = lanes_.emplace_back(*this, path, options);
      lane.backend = make_backend(lane.queue, options);
    }
  } catch (...) {
    stop();
    throw;
  }
}

FileStore::~FileStore() {
  stop();
}

void FileStore::stop() {
  for (Lane& lane : lanes_) lane.queue.stop();
  for (Lane& lane : lanes_) lane.backend.reset();
  // A callback may have submitted to a lane that had ended already: these are cancelled here.
  Piece piece;
  for (bool found = true; found;) {
    found = false;
    for (Lane& lane : lanes_) {
      if (!lane.queue.has_work()) continue;
      found = true;
      lane.queue.next(piece);
    }
  }
}

void FileStore::reserve(int64_t bytes) {
  if (bytes == 0) return;
  bytes = checked_extent_bytes(bytes);
  const std::lock_guard lock(grow_mutex_);
  if (bytes > space_.slab_bytes()) grow(bytes - space_.slab_bytes(), kBlockBytes);
  space_.raise_limit(bytes);
}

// All slabs or none. They are shared out over the paths, each slab long enough for `least_slab_bytes`.
void FileStore::grow(int64_t bytes, int64_t least_slab_bytes) {
  const int64_t share = bytes / static_cast<int64_t>(lanes_.size());
  const int64_t usual =
      std::max({std::min(slab_bytes_, share), bytes / kSlabsPerReservation, least_slab_bytes});
  const int64_t slab_bytes = round_up_to_block(usual);
  std::vector<Slab> made;
  try {
    for (int64_t left = bytes; left > 0;) {
      const int64_t size = std::max(std::min(left, slab_bytes), least_slab_bytes);
      Lane& lane = lane_for_slab(size);
      const auto number = static_cast<uint32_t>(slabs_.size() + made.size());
      made.push_back({lane.folder.create_slab(number, size, bytes), &lane});
      lane.reserved_bytes += size;
      left -= size;
    }
  } catch (...) {
    for (const Slab& slab : made) {
      ::unlink(slab.file.path.c_str());
      slab.lane->reserved_bytes -= slab.file.bytes;
    }
    throw;
  }
  const std::lock_guard lock(slabs_mutex_);
  for (Slab& slab : made) {
    const auto lane =
        std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& one) { return &one == slab.lane; });
    space_.add_slab(static_cast<int>(lane - lanes_.begin()), slab.file.bytes);
    slabs_.push_back(std::move(slab));
  }
}

// The path with the least on it among those with room; where none has, the roomiest, whose refusal names the
// numbers.
FileStore::Lane& FileStore::lane_for_slab(int64_t bytes) {
  Lane* best = nullptr;
  Lane* roomiest = &lanes_.front();
  for (Lane& lane : lanes_) {
    const int64_t available = lane.folder.available_bytes();
    if (available > roomiest->folder.available_bytes()) roomiest = &lane;
    if (available >= bytes && (best == nullptr || lane.reserved_bytes < best->reserved_bytes)) best = &lane;
  }
  return best != nullptr ? *best : *roomiest;
}

Extent FileStore::allocate(int64_t bytes) {
  bytes = checked_extent_bytes(bytes);
  if (const Extent extent = space_.allocate(bytes); !extent.empty()) return extent;
  // A reservation is a promise in bytes: where only fragmentation is in the way, another slab keeps it.
  const std::lock_guard lock(grow_mutex_);
  Extent extent = space_.allocate(bytes);
  if (extent.empty() && space_.within_limit(bytes)) {
    grow(bytes, bytes);
    extent = space_.allocate(bytes);
  }
  if (!extent.empty()) return extent;
  throw no_room(space_, bytes, lanes_.front().folder.path().string());
}

FileStore::Lane& FileStore::lane_of(const Extent& extent) {
  const std::shared_lock lock(slabs_mutex_);
  return extent.slab < slabs_.size() ? *slabs_[extent.slab].lane : lanes_.front();
}

void FileStore::enqueue(Transfer& transfer) {
  Lane& lane = lane_of(transfer.extent);
  lane.queue.push(transfer);
  lane.backend->wake();
}

Target FileStore::locate(const Transfer& transfer) {
  const std::shared_lock lock(slabs_mutex_);
  const uint32_t slab = transfer.extent.slab;
  return {.fd = slabs_[slab].file.fd.get(), .slab = slab, .sums = space_.sums(transfer.extent)};
}

std::string FileStore::path_of(const Target& target) {
  const std::shared_lock lock(slabs_mutex_);
  return slabs_[target.slab].file.path.string();
}

std::vector<ExportedExtent> FileStore::export_extents(std::span<const Extent> extents,
                                                      const std::filesystem::path& folder) {
  const HeldExtents held(space_, extents);
  std::vector<ExportItem> items;
  items.reserve(extents.size());
  for (const Extent& extent : extents) {
    const std::shared_lock lock(slabs_mutex_);
    items.push_back({extent, &slabs_[extent.slab].file, space_.sums(extent)});
  }
  return export_items(items, folder, job_);
}

void FileStore::register_memory(std::span<std::byte> memory) {
  for (Lane& lane : lanes_) lane.backend->register_memory(memory);
}

void FileStore::unregister_memory(std::span<std::byte> memory) {
  for (Lane& lane : lanes_) lane.backend->unregister_memory(memory);
}

StoreStats FileStore::stats() const {
  StoreStats stats = base_stats();
  for (const Lane& lane : lanes_) {
    stats.retries += lane.queue.retries();
    const bool refused = wants_direct_ && !lane.folder.direct();
    const std::string access = lane.folder.direct() ? "O_DIRECT"
                               : refused            ? "buffered (O_DIRECT refused)"
                                                    : "buffered";
    const std::string text = lane.backend->description(access);
    if (stats.backend.find(text) != std::string::npos) continue;  // paths that do the same are named once
    stats.backend += (stats.backend.empty() ? "" : "; ") + text;
  }
  return stats;
}

}  // namespace

std::unique_ptr<Store> make_file_store(const FileStoreOptions& options) {
  return std::make_unique<FileStore>(options);
}

}  // namespace overspill::io
