// What a folder offers as a place for the store, for people who ask before they start (`overspill doctor`).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "io/direct_alignment.h"

namespace overspill::io {

struct DiskProbe {
  bool direct = false;                              // O_DIRECT is accepted and works
  std::string direct_refusal;                       // why not
  std::optional<DirectAlignment> direct_alignment;  // where the kernel tells
  bool io_uring = false;
  std::string io_uring_refusal;     // why not
  int64_t memlock_limit_bytes = 0;  // -1: unlimited
  double write_bytes_per_s = 0;     // sequential, as the store does it
  double read_bytes_per_s = 0;
  int64_t free_bytes = 0;          // for this user
  std::string file_system;         // "ext4", "tmpfs", …; in hexadecimal where unknown
  std::optional<bool> rotational;  // where /sys tells
  std::vector<std::string> disks;  // below the folder; empty where unknown
  std::optional<int> numa_node;    // of the disks; empty where unknown
  std::string backend;             // what the store would take, as in StoreStats
};

/// Takes about two seconds and at most `scratch_bytes` of space in a folder of its own, which it removes.
/// Throws StoreError where the folder is missing, not writable or full.
DiskProbe probe_disk(const std::filesystem::path& folder, int64_t scratch_bytes = int64_t{256} << 20);

}  // namespace overspill::io
