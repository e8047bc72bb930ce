// What a store says of itself: counters, by path and in all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace overspill::io {

/// Of the stall watch (io/stall_watch.h).
struct StallStats {
  int64_t count = 0;       // stalls that stderr has named
  int64_t longest_ns = 0;  // the longest of them; of one that goes on, the time when it was last named
  int64_t now_ns = 0;      // how long the stall that goes on had lasted when it was last named; 0: none does
};

/// From submit() to the end of the last piece, of transfers that succeeded. Percentiles are at most 1/16 too
/// high.
struct LatencyStats {
  int64_t count = 0;
  int64_t p50_ns = 0;
  int64_t p99_ns = 0;
  int64_t p999_ns = 0;
  int64_t max_ns = 0;
};

/// How often the store retried, by reason.
struct RetryStats {
  int64_t at_once = 0;    // short transfers continued, EINTR
  int64_t reads = 0;      // failed with EIO or its kin
  int64_t writes = 0;     // the same, or no room: made in another place of the path
  int64_t shortages = 0;  // ENOMEM, EAGAIN, EBUSY: of the machine, not of the disk
  int64_t checksums = 0;  // what was read differed from its checksum

  /// The retries that a healthy machine does not need.
  int64_t troubles() const { return reads + writes + shortages + checksums; }
};

/// One path's part of StoreStats.
struct PathStats {
  std::string path;
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  int64_t in_flight = 0;  // transfers, now
  int64_t in_flight_max = 0;
  int64_t busy_ns = 0;          // at least one piece was at the kernel
  int64_t wait_ns = 0;          // from submit() to the first piece, summed over transfers
  double read_bytes_per_s = 0;  // while enough was asked of it, the last seconds count most; 0: not measured
  double write_bytes_per_s = 0;
  double share = 0;  // of new bytes, 0 to 1
  int64_t reserved_bytes = 0;
  std::optional<int> numa_node;  // of its disk; empty: unknown
  std::string access;            // "O_DIRECT", "buffered (why)"
  std::string closed;            // why it takes no new extents; empty: it takes them
  RetryStats retries;
  StallStats stalls;
  LatencyStats demand_reads;
  LatencyStats prefetch_reads;
  LatencyStats writes;
};

/// Counters since the store was opened. Each is exact, but they are not read at one instant.
struct StoreStats {
  int64_t bytes_read = 0;  // completed, as asked for by transfers
  int64_t bytes_written = 0;
  int64_t transfers = 0;
  int64_t retries = 0;  // at once: short transfers continued, EINTR
  int64_t in_flight_max = 0;
  int64_t allocated_bytes = 0;  // extents not released, or pinned
  int64_t reserved_bytes = 0;   // space the slabs take on disk
  std::string backend;          // "io_uring, O_DIRECT, registered buffers", …: what was taken, for people
  std::vector<PathStats> paths;
};

}  // namespace overspill::io
