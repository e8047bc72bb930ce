#include "engine/memory/range_allocator.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace overspill::engine {

RangeAllocator::RangeAllocator(int64_t bytes, int64_t align)
    : align_(align), free_bytes_(bytes / align * align) {
  if (free_bytes_ > 0) free_.push_back({0, free_bytes_});
}

int64_t RangeAllocator::rounded(int64_t bytes) const {
  return std::max(align_, (bytes + align_ - 1) / align_ * align_);
}

std::optional<int64_t> RangeAllocator::allocate(int64_t bytes, End end) {
  bytes = rounded(bytes);
  const auto fits = [bytes](const Run& run) { return run.bytes >= bytes; };
  auto run = free_.end();
  if (end == End::low) {
    run = std::find_if(free_.begin(), free_.end(), fits);
  } else {
    const auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (found != free_.rend()) run = std::prev(found.base());
  }
  if (run == free_.end()) return std::nullopt;
  return take(run, end == End::low ? run->begin : run->begin + run->bytes - bytes, bytes);
}

std::optional<int64_t> RangeAllocator::allocate(int64_t bytes, const LeasePlaces::Place& place) {
  bytes = rounded(bytes);
  for (auto run = free_.begin(); run != free_.end(); ++run) {
    int64_t offset = std::max(run->begin, place.begin);
    if (place.cell > 0) {  // what would cross the cell's end begins with the next one
      const int64_t from = offset - place.begin;
      if (from % place.cell + bytes > place.cell) offset = place.begin + (from / place.cell + 1) * place.cell;
    }
    if (offset + bytes <= std::min(run->begin + run->bytes, place.end)) return take(run, offset, bytes);
  }
  return std::nullopt;
}

/// Out of a free run, of which the rest stays free.
int64_t RangeAllocator::take(std::vector<Run>::iterator run, int64_t offset, int64_t bytes) {
  const Run before{run->begin, offset - run->begin};
  const Run after{offset + bytes, run->begin + run->bytes - offset - bytes};
  if (before.bytes > 0 && after.bytes > 0) {
    *run = before;
    free_.insert(std::next(run), after);
  } else if (before.bytes > 0 || after.bytes > 0) {
    *run = before.bytes > 0 ? before : after;
  } else {
    free_.erase(run);
  }
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
