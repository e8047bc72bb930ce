// What a training step asks of the store: every extent is read, its successor written, the old one released;
// a few chunks at a time, in the same order each step.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "io/store.h"

namespace overspill::io {

class StepWorkload {
 public:
  /// Writes `chunks` times extents of 1, 2 and 2 MiB (lo, m, v). `slots` chunks are in memory at once.
  StepWorkload(Store& store, int chunks, int slots, std::byte* memory)
      : store_(store), slots_(static_cast<size_t>(slots)) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      slots_[i].owner = this;
      for (size_t part = 0; part < kParts.size(); ++part) {
        Transfer& transfer = slots_[i].transfers[part];
        transfer.memory =
            memory + static_cast<int64_t>(i) * kChunkBytes + (part == 0 ? 0 : 2 * part - 1) * kMiB;
        transfer.context = &slots_[i];
        transfer.on_complete = [](Transfer& one) noexcept {
          Slot& slot = *static_cast<Slot*>(one.context);
          slot.owner->completed(slot, one);
        };
      }
    }
    extents_.resize(static_cast<size_t>(chunks));
    run();  // nothing is there yet: only writes
  }

  static constexpr int64_t kMiB = int64_t{1} << 20;
  static constexpr int64_t kChunkBytes = 5 * kMiB;

  /// One step. Throws StoreError.
  void run() {
    std::unique_lock lock(mutex_);
    next_ = done_ = 0;
    for (Slot& slot : slots_) start(slot);
    changed_.wait(lock, [&] { return done_ == extents_.size() || error_; });
    if (error_) throw StoreError(*error_);
  }

  const std::deque<std::array<Extent, 3>>& extents() const { return extents_; }

 private:
  static constexpr std::array<int64_t, 3> kParts{kMiB, 2 * kMiB, 2 * kMiB};
  struct Slot {
    StepWorkload* owner = nullptr;
    size_t chunk = 0;
    int in_flight = 0;
    bool writing = false;
    std::array<Transfer, 3> transfers;
  };

  void start(Slot& slot) {
    if (next_ == extents_.size()) return;
    slot.chunk = next_++;
    submit(slot, extents_[slot.chunk][0].empty());
  }

  void submit(Slot& slot, bool writing) {
    slot.writing = writing;
    slot.in_flight = 3;
    for (size_t part = 0; part < kParts.size(); ++part) {
      Transfer& transfer = slot.transfers[part];
      transfer.kind = writing ? Transfer::Kind::write : Transfer::Kind::read;
      transfer.priority = writing ? Transfer::Priority::write_behind : Transfer::Priority::demand;
      transfer.extent = writing ? store_.allocate(kParts[part]) : extents_[slot.chunk][part];
      store_.submit(transfer);
    }
  }

  void completed(Slot& slot, const Transfer& transfer) noexcept {
    const std::lock_guard lock(mutex_);
    if (transfer.error && !error_) error_ = transfer.error;
    if (--slot.in_flight > 0) return;
    if (!error_) {
      try {
        if (!slot.writing) return submit(slot, true);
        for (size_t part = 0; part < kParts.size(); ++part) {
          Extent& extent = extents_[slot.chunk][part];
          if (!extent.empty()) store_.release(extent);
          extent = slot.transfers[part].extent;
        }
        ++done_;
        start(slot);
      } catch (const StoreError& error) {
        error_ = error.error();
      }
    }
    changed_.notify_all();
  }

  Store& store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;
  std::deque<std::array<Extent, 3>> extents_;
  size_t next_ = 0;
  size_t done_ = 0;
  std::optional<Error> error_;
};

}  // namespace overspill::io
