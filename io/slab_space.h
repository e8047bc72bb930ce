// Who owns which bytes of which slab: free runs, extents, generations, pins, checksums. Knows no files; the
// file store and the in-memory store share it.
//
// Threads: every method may be called from any thread. Nodes come from a pool, so that a steady state of
// allocating and releasing asks nothing of malloc.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "io/error.h"
#include "io/store.h"

namespace overspill::io {

/// Whether the transfer's own fields are in order; its extent is begin()'s matter. Throws where nobody could
/// be told.
std::optional<Error> check_transfer(const Transfer& transfer);

class SlabSpace {
 public:
  /// A new empty slab of `group` (the path it lies on); its number.
  uint32_t add_slab(int group, int64_t bytes);

  /// Bytes of a slab that hold something already, as an earlier run wrote it: an extent that is written,
  /// pinned `pins` times, and released. The caller has checked that it lies in a free run.
  Extent occupy(uint32_t slab, int64_t offset, int64_t bytes, std::span<const uint64_t> checksums, int pins);
  /// The extent that lies there, if it is written and has these checksums.
  std::optional<Extent> written_at(uint32_t slab, int64_t offset, int64_t bytes,
                                   std::span<const uint64_t> checksums) const;
  /// Makes a released extent, which pins keep, the caller's again. False where somebody owns it.
  bool reclaim(const Extent& extent);

  /// The limit for allocate(), in bytes; only grows.
  void raise_limit(int64_t bytes);
  int64_t limit_bytes() const;
  int64_t slab_bytes() const;
  int64_t allocated_bytes() const;

  /// First fit in the group; an empty extent when the limit or every run of it is too small.
  Extent allocate(int64_t bytes, int group = 0);
  /// Whether `bytes` more are within the limit, so that only fragmentation keeps allocate() from succeeding.
  bool within_limit(int64_t bytes) const;

  void release(const Extent& extent);
  void pin(const Extent& extent);
  void unpin(const Extent& extent);

  /// Takes up a transfer, or says why not. Until end() the extent's bytes are not reused, even if it is
  /// released.
  std::optional<Error> begin(Transfer::Kind kind, const Extent& extent);
  void end(Transfer::Kind kind, const Extent& extent, bool succeeded);

  /// The extent's checksums; valid while the extent is held by begin() or a pin.
  std::span<uint64_t> sums(const Extent& extent);
  /// Whether a write of the extent has completed.
  bool written(const Extent& extent) const;

 private:
  enum class Content : uint8_t { undefined, writing, written };

  struct Record {
    uint32_t generation;
    int64_t bytes;
    std::pmr::vector<uint64_t> sums;
    int32_t pins = 0;
    int32_t transfers = 0;
    bool released = false;
    Content content = Content::undefined;
  };

  struct Slab {
    int group;
    int64_t bytes;
    int64_t free_bytes;
    std::pmr::map<int64_t, int64_t> free_runs;  // offset -> bytes, never adjacent
    std::pmr::unordered_map<int64_t, Record> records;
  };

  uint32_t next_generation() REQUIRES(mutex_);
  Extent allocate_in(Slab& slab, uint32_t number, int64_t bytes) REQUIRES(mutex_);
  Record* find(const Extent& extent) REQUIRES(mutex_);
  const Record* find(const Extent& extent) const REQUIRES(mutex_) {
    return const_cast<SlabSpace*>(this)->find(extent);
  }
  Record& require(const Extent& extent, const char* what) REQUIRES(mutex_);
  void free_if_unused(const Extent& extent, const Record& record) REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::pmr::unsynchronized_pool_resource pool_ GUARDED_BY(mutex_);
  std::vector<Slab> slabs_ GUARDED_BY(mutex_);
  uint32_t last_generation_ GUARDED_BY(mutex_) = 0;
  int64_t limit_bytes_ GUARDED_BY(mutex_) = 0;
  int64_t slab_bytes_ GUARDED_BY(mutex_) = 0;
  int64_t allocated_bytes_ GUARDED_BY(mutex_) = 0;
};

/// Keeps written extents from being reused while it lives. Throws StoreError where one was never written.
class HeldExtents {
 public:
  HeldExtents(SlabSpace& space, std::span<const Extent> extents) : space_(space) {
    for (const Extent& extent : extents) {
      if (const auto error = space_.begin(Transfer::Kind::read, extent)) {
        let_go();
        throw StoreError(*error);
      }
      held_.push_back(extent);
    }
  }
  ~HeldExtents() { let_go(); }
  HeldExtents(const HeldExtents&) = delete;
  HeldExtents& operator=(const HeldExtents&) = delete;

 private:
  void let_go() {
    for (const Extent& extent : held_) space_.end(Transfer::Kind::read, extent, true);
  }

  SlabSpace& space_;
  std::vector<Extent> held_;
};

}  // namespace overspill::io
