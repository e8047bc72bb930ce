// Offsets in a region of fixed size: first fit from either end, neighbours merged on release. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace overspill::engine {

class RangeAllocator {
 public:
  enum class End : uint8_t { low, high };

  RangeAllocator(int64_t bytes, int64_t align);

  /// Nothing when no free run is long enough. Large and small blocks are kept apart by taking them from
  /// different ends.
  std::optional<int64_t> allocate(int64_t bytes, End end);

  /// `offset` is one that allocate() gave; anything else throws std::logic_error.
  void release(int64_t offset);

  int64_t free_bytes() const { return free_bytes_; }
  int64_t largest_free_run() const;

 private:
  struct Run {
    int64_t begin;
    int64_t bytes;
  };

  int64_t align_;
  int64_t free_bytes_;
  std::vector<Run> free_;  // by offset, never adjacent
  std::vector<Run> used_;  // in no order
};

}  // namespace overspill::engine
