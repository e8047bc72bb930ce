#include "engine/memory/range_allocator.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace overspill::engine {

RangeAllocator::RangeAllocator(int64_t bytes, int64_t align)
    : align_(align), free_bytes_(bytes / align * align) {
  if (free_bytes_ > 0) free_.emplace(0, free_bytes_);
}

std::optional<int64_t> RangeAllocator::allocate(int64_t bytes, End end) {
  bytes = std::max(align_, (bytes + align_ - 1) / align_ * align_);
  const auto fits = [bytes](const auto& run) { return run.second >= bytes; };
  auto run = free_.end();
  if (end == End::low) {
    run = std::find_if(free_.begin(), free_.end(), fits);
  } else {
    const auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (found != free_.rend()) run = std::prev(found.base());
  }
  if (run == free_.end()) return std::nullopt;
  const auto [begin, length] = *run;
  free_.erase(run);
  const int64_t offset = end == End::low ? begin : begin + length - bytes;
  if (length > bytes) free_.emplace(end == End::low ? begin + bytes : begin, length - bytes);
  used_.emplace(offset, bytes);
  free_bytes_ -= bytes;
  return offset;
}

void RangeAllocator::release(int64_t offset) {
  const auto used = used_.find(offset);
  if (used == used_.end())
    throw std::logic_error("RangeAllocator: release of an offset that is not allocated");
  int64_t begin = offset;
  int64_t bytes = used->second;
  free_bytes_ += bytes;
  used_.erase(used);
  const auto after = free_.lower_bound(begin);
  if (after != free_.end() && after->first == begin + bytes) {
    bytes += after->second;
    free_.erase(after);
  }
  const auto next = free_.lower_bound(begin);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      bytes += before->second;
      free_.erase(before);
    }
  }
  free_.emplace(begin, bytes);
}

int64_t RangeAllocator::largest_free_run() const {
  int64_t largest = 0;
  for (const auto& [offset, bytes] : free_) largest = std::max(largest, bytes);
  return largest;
}

}  // namespace overspill::engine
