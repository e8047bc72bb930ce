// The common base of the file store and the in-memory store: extents, transfers in flight, counters.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/in_flight.h"
#include "io/piece_queue.h"
#include "io/slab_space.h"
#include "io/store.h"

namespace overspill::io {

/// `Interface` is Store or derives from it.
template <typename Interface>
class StoreBase : public Interface, protected TransferOwner {
 public:
  void release(const Extent& extent) override { space_.release(extent); }
  void pin(const Extent& extent) override { space_.pin(extent); }
  void unpin(const Extent& extent) override { space_.unpin(extent); }
  bool reclaim(const Extent& extent) override { return space_.reclaim(extent); }
  void drain() override {
    in_flight_.drain([this] { return this->poll(); });
  }

  void submit(Transfer& transfer) override {
    transfer.retries = 0;
    transfer.error = check_transfer(transfer);
    if (!transfer.error) transfer.error = space_.begin(transfer.kind, transfer.extent);
    transfer.held = !transfer.error;
    in_flight_.begin(transfer);
    enqueue(transfer);  // afterwards the transfer may be complete, and gone
  }

 protected:
  /// Queues it with whoever moves its slab; an extent of no slab goes to any queue, which completes it.
  virtual void enqueue(Transfer& transfer) = 0;

  void completed(Transfer& transfer) noexcept override {
    const uint8_t epoch = transfer.epoch;
    const bool succeeded = !transfer.error;
    if (transfer.held) space_.end(transfer.kind, transfer.extent, succeeded);
    ++transfers_;
    transfer.on_complete(transfer);  // afterwards the transfer may be in use again
    in_flight_.end(epoch);
  }

  /// All but `backend`.
  StoreStats base_stats(std::vector<PathStats> paths) const {
    StoreStats stats;
    for (const PathStats& path : paths) {
      stats.bytes_read += path.bytes_read;
      stats.bytes_written += path.bytes_written;
      stats.retries += path.retries.at_once;
    }
    stats.transfers = transfers_;
    stats.in_flight_max = in_flight_.max();
    stats.allocated_bytes = space_.allocated_bytes();
    stats.reserved_bytes = space_.slab_bytes();
    stats.paths = std::move(paths);
    return stats;
  }

  SlabSpace space_;

 private:
  InFlight in_flight_;
  std::atomic<int64_t> transfers_ = 0;
};

/// Throws unless `bytes` is positive; what allocate() takes for it.
int64_t checked_extent_bytes(int64_t bytes);

/// The error of an allocate() that found nothing.
StoreError no_room(const SlabSpace& space, int64_t bytes, std::string path);

}  // namespace overspill::io
