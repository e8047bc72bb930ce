#include "engine/memory/range_allocator.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace overspill::engine {

RangeAllocator::RangeAllocator(int64_t bytes, int64_t align)
    : align_(align), free_bytes_(bytes / align * align) {
  if (free_bytes_ > 0) free_.push_back({0, free_bytes_});
}

std::optional<int64_t> RangeAllocator::allocate(int64_t bytes, End end) {
  bytes = std::max(align_, (bytes + align_ - 1) / align_ * align_);
  const auto fits = [bytes](const Run& run) { return run.bytes >= bytes; };
  auto run = free_.end();
  if (end == End::low) {
    run = std::find_if(free_.begin(), free_.end(), fits);
  } else {
    const auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (found != free_.rend()) run = std::prev(found.base());
  }
  if (run == free_.end()) return std::nullopt;
  const int64_t offset = end == End::low ? run->begin : run->begin + run->bytes - bytes;
  if (end == End::low) run->begin += bytes;
  run->bytes -= bytes;
  if (run->bytes == 0) free_.erase(run);
  used_.push_back({offset, bytes});
  free_bytes_ -= bytes;
  return offset;
}

void RangeAllocator::release(int64_t offset) {
  const auto used =
      std::find_if(used_.begin(), used_.end(), [&](const Run& run) { return run.begin == offset; });
  if (used == used_.end())
    throw std::logic_error("RangeAllocator: release of an offset that is not allocated");
  const int64_t bytes = used->bytes;
  free_bytes_ += bytes;
  *used = used_.back();
  used_.pop_back();
  auto after = std::find_if(free_.begin(), free_.end(), [&](const Run& run) { return run.begin > offset; });
  const bool joins_after = after != free_.end() && after->begin == offset + bytes;
  const bool joins_before =
      after != free_.begin() && std::prev(after)->begin + std::prev(after)->bytes == offset;
  if (joins_before && joins_after) {
    std::prev(after)->bytes += bytes + after->bytes;
    free_.erase(after);
  } else if (joins_before) {
    std::prev(after)->bytes += bytes;
  } else if (joins_after) {
    after->begin = offset;
    after->bytes += bytes;
  } else {
    free_.insert(after, {offset, bytes});
  }
}

int64_t RangeAllocator::largest_free_run() const {
  int64_t largest = 0;
  for (const Run& run : free_) largest = std::max(largest, run.bytes);
  return largest;
}

}  // namespace overspill::engine
