// Distributes bytes over paths of different speed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace overspill::io {

/// Bytes per second; 0: not known.
struct PathSpeed {
  double read_bytes_per_s = 0;
  double write_bytes_per_s = 0;
};

/// Bytes per second of a path on which every byte is read once and written once; 0 where either speed is
/// unknown.
double step_bytes_per_s(const PathSpeed& speed);

/// Smooth weighted round robin over bytes: each allocation gives every open path credit by its weight, and
/// the path that takes it pays. So any run of allocations is shared out as the weights are, neighbours lie on
/// different paths, and new weights count from the next allocation on. A value; the caller locks.
class Balance {
 public:
  static constexpr size_t kPathsMax = 64;

  /// Throws StoreError for no path, or more than kPathsMax.
  explicit Balance(size_t paths);

  /// Above 0.
  void set_weight(size_t path, double weight) { paths_[path].weight = weight; }
  /// Closes the path to new extents; false, and nothing changes, if it is the last open one.
  bool close(size_t path);
  bool is_open(size_t path) const { return paths_[path].open; }
  double weight(size_t path) const { return paths_[path].weight; }
  /// Of new bytes, 0 to 1.
  double share(size_t path) const;

  /// The path that is furthest behind its share, among those open whose bit in `refused` is not set.
  std::optional<size_t> next(int64_t bytes, uint64_t refused) const;
  void took(size_t path, int64_t bytes);

 private:
  struct Path {
    double weight = 1;
    double credit_bytes = 0;
    bool open = true;
  };
  double total_weight() const;

  std::vector<Path> paths_;
};

/// `bytes` by weight, in whole blocks, none above its capacity: what one path cannot take, the others do by
/// their weights. Adds up to less than `bytes` only where all capacities are taken; a weight of 0 takes none.
std::vector<int64_t> apportion(int64_t bytes, std::span<const double> weights,
                               std::span<const int64_t> capacities);

}  // namespace overspill::io
