// The store in memory, with seeded faults, for tests of the engine. Transfers go through the same code as on
// disk (pieces, checksums, judgement of results); only the kernel is simulated.
//
// Completions come from the store's own thread after real delays. Given a VirtualTime, they come in poll() on
// the waiting thread instead, and the seed then repeats a run exactly.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "io/store.h"
#include "io/virtual_time.h"

namespace overspill::io {

/// Probabilities are per piece (see piece_bytes), in [0, 1].
struct Faults {
  uint64_t seed = 1;
  std::chrono::microseconds delay_min{0};
  std::chrono::microseconds delay_max{0};
  bool reorder = false;       // completions in random order
  double short_transfer = 0;  // a part is moved, the store continues
  double interrupted = 0;     // EINTR or EAGAIN, the store retries
  double passing_error = 0;   // a read or write that fails once or a few times in a row, the store retries
  double read_error = 0;      // for good: that place cannot be read any more until it is written
  int read_errno = EIO;
  double write_error = 0;
  int write_errno = EIO;
  double bit_flip_on_read = 0;   // one bit of what a read returns
  double bit_flip_at_rest = 0;   // one bit of what a write left
  double lost_write = 0;         // reported as done, nothing landed
  double misdirected_write = 0;  // landed in another place; its own keeps the old bytes
  double misdirected_read = 0;   // another place's bytes
  double export_error = 0;       // per export_extents, ENOSPC; nothing is left in the folder
  double dropped_at_cut = 1;     // per unsynced extent, at cut()
  double torn_at_cut = 0;        // per unsynced extent that is not dropped: a prefix is left

  bool has_any() const {
    return delay_max.count() > 0 || reorder || short_transfer > 0 || interrupted > 0 || passing_error > 0 ||
           read_error > 0 || write_error > 0 || bit_flip_on_read > 0 || bit_flip_at_rest > 0 ||
           lost_write > 0 || misdirected_write > 0 || misdirected_read > 0 || export_error > 0;
  }
};

/// How often each fault was injected.
struct FaultCounts {
  int64_t delayed = 0;
  int64_t reordered = 0;
  int64_t short_transfers = 0;
  int64_t interrupted = 0;
  int64_t passing_errors = 0;
  int64_t read_errors = 0;
  int64_t write_errors = 0;
  int64_t bit_flips = 0;  // on reads
  int64_t bit_flips_at_rest = 0;
  int64_t lost_writes = 0;
  int64_t misdirected_writes = 0;
  int64_t misdirected_reads = 0;
  int64_t export_errors = 0;
  int64_t dropped = 0;
  int64_t torn = 0;
};

/// One answer of the simulated kernel.
struct Answer {
  int64_t time_us = 0;
  bool writes = false;
  int64_t offset = 0;
  int64_t asked_bytes = 0;
  int64_t result = 0;  // bytes, or a negative errno
  const char* fault = "";
};

class MemoryStore : public Store {
 public:
  virtual FaultCounts fault_counts() const = 0;
  virtual uint64_t seed() const = 0;
  /// Simulates a power failure: extents written and not exported since are dropped or torn, and read as
  /// `corrupt` from then on. Call drain() first.
  virtual void cut() = 0;
  /// Changes one bit of an extent's stored bytes.
  virtual void flip_bit(const Extent& extent, int64_t bit) = 0;
  /// Bytes of extents that are written and not released; and the minimum since the last call.
  virtual int64_t complete_bytes() const = 0;
  virtual int64_t take_least_complete_bytes() = 0;
  /// Every answer so far, in order; kept under virtual time only.
  virtual const std::vector<Answer>& answers() const = 0;
};

/// A store of at most `capacity_bytes`, taken from memory as it is written. export_extents() writes copies
/// into the real folder. The seed is printed to stderr when a fault is configured, for the reader of a
/// failing test, unless time is virtual: then the test prints it. With `time` it has no thread, and one
/// thread at a time may use it: see Store::poll.
std::unique_ptr<MemoryStore> make_memory_store(int64_t capacity_bytes, const Faults& faults = {},
                                               int64_t piece_bytes = int64_t{1} << 20,
                                               std::shared_ptr<VirtualTime> time = nullptr);

}  // namespace overspill::io
