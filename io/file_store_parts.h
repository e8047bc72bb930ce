// The store over files as its own sources share it; others take io/file_store.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "io/backend.h"
#include "io/balance.h"
#include "io/block_device.h"
#include "io/file_store.h"
#include "io/job_folder.h"
#include "io/own_process.h"
#include "io/piece_queue.h"
#include "io/slab_share.h"
#include "io/stall_watch.h"
#include "io/store_base.h"

namespace overspill::io {

// A path that is full keeps what it has; a broken one is not trusted with new data either.
inline bool is_full(ErrorKind kind) {
  return kind == ErrorKind::no_space || kind == ErrorKind::quota;
}
inline bool is_broken(ErrorKind kind) {
  return kind == ErrorKind::device || kind == ErrorKind::denied || kind == ErrorKind::vanished;
}

class FileStore final : public StoreBase<Store> {
 public:
  explicit FileStore(const FileStoreOptions& options);
  ~FileStore() override;

  void reserve(int64_t bytes) override;
  TakenOver take_over(std::span<const KeptSlabs> kept) override;
  std::optional<Extent> own_extent(const std::filesystem::path& file, int64_t offset, int64_t bytes,
                                   std::span<const uint64_t> checksums) const override;
  Extent allocate(int64_t bytes) override;
  Export export_extents(std::span<const Extent> extents, const std::filesystem::path& folder,
                        ExportPace& pace) override;
  using Store::export_extents;
  bool share_lives(uint64_t share) const override { return shares_.alive(share); }
  void share_named(uint64_t share, const std::filesystem::path& folder, const std::string& prefix) override {
    shares_.named(share, folder, prefix);
  }
  void end_share(uint64_t share) noexcept override { shares_.end(share); }
  void register_memory(std::span<std::byte> memory) override;
  void unregister_memory(std::span<std::byte> memory) override;
  std::string file_of(const Extent& extent) const override;
  StoreStats stats() const override;
  std::shared_ptr<StallWatch> watch() const override { return watch_; }
  bool kernel_keeps_memory() override;

 private:
  // What works on one path.
  struct Lane {
    Lane(FileStore& store, const std::filesystem::path& base, const FileStoreOptions& options)
        : path(base.string()),
          folder(base, options.job, options.direct),
          numa_node(numa_node_of(disks_of(base))),
          queue(store, options.queue_depth, options.piece_bytes, options.result_hook,
                options.patience.retry) {}

    const std::string path;
    JobFolder folder;
    const std::optional<int> numa_node;
    PieceQueue queue;
    std::unique_ptr<Backend> backend;
    std::atomic<int64_t> reserved_bytes = 0;  // changed by who grows
  };
  struct Slab {
    SlabFile file;
    size_t lane;
  };
  // What the backends' threads work on. Where one of these threads hangs, this is never freed.
  struct Parts {
    std::deque<Lane> lanes;
    std::deque<Slab> slabs;
  };
  // What a path had to say while space was taken.
  struct Growth {
    std::vector<Slab> made;
    std::vector<int64_t> capacity_bytes;
    std::vector<std::optional<StoreError>> refusals;
  };

  void enqueue(Transfer& transfer) override;
  void completed(Transfer& transfer) noexcept override;
  Target locate(const Transfer& transfer) override;
  std::string path_of(const Target& target) override;
  void first_retry(const Error& why) noexcept override;
  void given_up() noexcept override { watch_->wake(); }

  size_t lane_of(const Extent& extent) const EXCLUDES(slabs_mutex_);
  Extent place(int64_t bytes) EXCLUDES(balance_mutex_, slabs_mutex_);
  void explain_no_space(Transfer& transfer) noexcept;
  bool move_elsewhere(Transfer& transfer) noexcept;
  bool write_later(Transfer& transfer) noexcept;
  void close(size_t lane, const Error& error) EXCLUDES(balance_mutex_, slabs_mutex_);
  static void warn(const Lane& lane, const std::string& what);
  void set_first_weights(const FileStoreOptions& options);
  void follow_speeds() REQUIRES(balance_mutex_);

  struct LeftSlab;
  static std::map<FileId, LeftSlab> left_slabs(std::span<const KeptSlabs> kept);
  std::optional<size_t> lane_on(uint64_t device) const;
  void take_slab(LeftSlab& slab, const FileId& id, std::span<const KeptSlabs> kept, TakenOver& taken)
      REQUIRES(grow_mutex_);
  uint64_t share_of(const KeptSlabs& kept, TakenOver::Folder& folder, size_t lane);

  void grow_to(int64_t bytes) REQUIRES(grow_mutex_);
  bool grow_lane(size_t lane, int64_t bytes, int64_t wanted_bytes, Growth& growth) REQUIRES(grow_mutex_);
  void add_slab_for(int64_t bytes) REQUIRES(grow_mutex_);
  bool make_slab(size_t lane, int64_t bytes, int64_t wanted_bytes, Growth& growth) REQUIRES(grow_mutex_);
  void adopt(Growth& growth) REQUIRES(grow_mutex_) EXCLUDES(slabs_mutex_);
  void undo(Growth& growth) REQUIRES(grow_mutex_);
  StoreError too_small(int64_t wanted_bytes, const Growth& growth, std::span<const int64_t> parts) const;
  size_t slab_count() const EXCLUDES(slabs_mutex_);
  void stop();

  const std::string job_;
  const int64_t slab_bytes_;

  const OwnProcess process_;
  std::shared_ptr<Parts> parts_ = std::make_shared<Parts>();
  std::deque<Lane>& lanes_ = parts_->lanes;

  Mutex grow_mutex_ ACQUIRED_BEFORE(balance_mutex_, slabs_mutex_);  // held while files grow
  std::vector<bool> warned_of_room_ GUARDED_BY(grow_mutex_);        // by lane
  mutable SharedMutex slabs_mutex_;
  std::deque<Slab>& slabs_ GUARDED_BY(slabs_mutex_) = parts_->slabs;  // only grows; its entries never move
  const std::shared_ptr<StallWatch> watch_;
  SlabShares shares_;
  mutable Mutex balance_mutex_ ACQUIRED_BEFORE(slabs_mutex_);
  Balance balance_ GUARDED_BY(balance_mutex_);
  std::vector<std::string> closed_ GUARDED_BY(balance_mutex_);  // by lane: why it takes no new data
};

}  // namespace overspill::io
