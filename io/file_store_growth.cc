// Space of the store over files: slabs by what each path is worth and has room for, extents in them.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <system_error>
#include <utility>

#include "io/file_store_parts.h"

namespace overspill::io {
namespace {

// One reservation makes about this many slabs at most: each is an open file.
constexpr int64_t kSlabsPerReservation = 64;
// Several paths together reserve this part of the reservation more.
constexpr int64_t kSlackPart = 8;

}  // namespace

void FileStore::reserve(int64_t bytes) {
  if (bytes == 0) return;
  bytes = checked_extent_bytes(bytes);
  const MutexLock lock(grow_mutex_);
  if (bytes > space_.slab_bytes() || (lanes_.size() > 1 && bytes > space_.limit_bytes())) grow_to(bytes);
  space_.raise_limit(bytes);
}

// Slabs of at least `bytes` in all, by weight, or none. Several paths get a little more where they have room,
// so that their shares may move.
void FileStore::grow_to(int64_t bytes) {
  std::vector<double> weights;
  {
    const MutexLock lock(balance_mutex_);
    follow_speeds();
    for (size_t i = 0; i < lanes_.size(); ++i)
      weights.push_back(balance_.is_open(i) ? balance_.weight(i) : 0);
  }
  Growth growth{.made = {}, .capacity_bytes = {}, .refusals = {}};
  growth.refusals.resize(lanes_.size());
  for (const Lane& lane : lanes_) {
    // A path that is alone, or gone, is asked for all of it: its refusal has the numbers and the reason.
    std::error_code error;
    const bool ask = lanes_.size() == 1 || !std::filesystem::exists(lane.folder.path(), error);
    growth.capacity_bytes.push_back(lane.reserved_bytes + (ask ? bytes : lane.folder.available_bytes()));
  }
  const int64_t with_slack = lanes_.size() == 1 ? bytes : bytes + bytes / kSlackPart;
  // Each round takes all that is wanted, or one path less.
  while (true) {
    const std::vector<int64_t> parts = apportion(with_slack, weights, growth.capacity_bytes);
    if (std::accumulate(parts.begin(), parts.end(), int64_t{0}) < bytes) {
      undo(growth);
      throw too_small(bytes, growth, parts);
    }
    bool all = true;
    for (size_t i = 0; i < lanes_.size() && all; ++i)
      all = grow_lane(i, parts[i] - lanes_[i].reserved_bytes, bytes - space_.slab_bytes(), growth);
    std::vector<bool> open(lanes_.size());
    {
      const MutexLock lock(balance_mutex_);
      for (size_t i = 0; i < lanes_.size(); ++i) open[i] = balance_.is_open(i);
    }
    for (size_t i = 0; i < lanes_.size(); ++i) weights[i] = open[i] ? weights[i] : 0;
    if (!all) continue;
    const std::vector<int64_t> unlimited(lanes_.size(), std::numeric_limits<int64_t>::max() / 2);
    const std::vector<int64_t> fair = apportion(bytes, weights, unlimited);
    for (size_t i = 0; i < lanes_.size(); ++i) {
      if (parts[i] < fair[i] && open[i] && !warned_of_room_[i]) {
        warned_of_room_[i] = true;
        warn(lanes_[i],
             fmt::format("has room for {} of the {} bytes that its speed is worth; the other paths "
                         "take the rest",
                         parts[i], fair[i]));
      }
    }
    break;
  }
  adopt(growth);
}

// False: the path refused, and its capacity is what it has.
bool FileStore::grow_lane(size_t lane, int64_t bytes, int64_t wanted_bytes, Growth& growth) {
  const int64_t usual =
      round_up_to_block(std::max(std::min(slab_bytes_, bytes), wanted_bytes / kSlabsPerReservation));
  for (int64_t left = bytes; left > 0;) {
    const int64_t size = std::min(left, usual);
    if (!make_slab(lane, size, wanted_bytes, growth)) return false;
    left -= size;
  }
  return true;
}

size_t FileStore::slab_count() const {
  const ReaderLock lock(slabs_mutex_);
  return slabs_.size();
}

bool FileStore::make_slab(size_t lane, int64_t bytes, int64_t wanted_bytes, Growth& growth) {
  const auto number = static_cast<uint32_t>(slab_count() + growth.made.size());
  try {
    growth.made.push_back({lanes_[lane].folder.create_slab(number, bytes, wanted_bytes, watch_.get()), lane});
  } catch (const StoreError& error) {
    growth.capacity_bytes[lane] = lanes_[lane].reserved_bytes;
    growth.refusals[lane] = error;
    if (is_broken(error.error().kind)) close(lane, error.error());
    return false;
  }
  lanes_[lane].reserved_bytes += bytes;
  return true;
}

void FileStore::undo(Growth& growth) {
  for (const Slab& slab : growth.made) {
    ::unlink(slab.file.path.c_str());
    lanes_[slab.lane].reserved_bytes -= slab.file.bytes;
  }
}

void FileStore::adopt(Growth& growth) {
  const MutexLock lock(slabs_mutex_);
  for (Slab& slab : growth.made) {
    space_.add_slab(static_cast<int>(slab.lane), slab.file.bytes);
    slabs_.push_back(std::move(slab));
  }
}

StoreError FileStore::too_small(int64_t wanted_bytes, const Growth& growth,
                                std::span<const int64_t> parts) const {
  if (lanes_.size() == 1 && growth.refusals[0]) return *growth.refusals[0];
  Error error{.kind = ErrorKind::no_space, .operation = Operation::reserve};
  error.detail = fmt::format("wanted {} bytes over {} paths", wanted_bytes, lanes_.size());
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const Lane& lane = lanes_[i];
    error.path += (i > 0 ? ", " : "") + lane.path;
    error.detail += fmt::format("; {}: wanted {}, {} available beside {} reserved{}", lane.path, parts[i],
                                lane.folder.available_bytes(), lane.reserved_bytes.load(),
                                growth.refusals[i] ? fmt::format(" ({})", growth.refusals[i]->what()) : "");
  }
  return StoreError(std::move(error));
}

// One more slab, long enough for an extent that the reservation promises and fragmentation refuses.
void FileStore::add_slab_for(int64_t bytes) {
  Growth growth{.made = {}, .capacity_bytes = std::vector<int64_t>(lanes_.size(), 0), .refusals = {}};
  growth.refusals.resize(lanes_.size());
  uint64_t refused = 0;
  while (true) {
    std::optional<size_t> lane;
    {
      const MutexLock lock(balance_mutex_);
      lane = balance_.next(bytes, refused);
    }
    if (!lane) throw too_small(bytes, growth, std::vector<int64_t>(lanes_.size(), bytes));
    if (make_slab(*lane, bytes, bytes, growth)) return adopt(growth);
    refused |= uint64_t{1} << *lane;
  }
}

// On the path that is furthest behind its share and has room; an empty extent where none has.
Extent FileStore::place(int64_t bytes) {
  const MutexLock lock(balance_mutex_);
  if (lanes_.size() > 1) follow_speeds();
  for (uint64_t refused = 0;;) {
    const auto lane = balance_.next(bytes, refused);
    if (!lane) return {};
    const Extent extent = space_.allocate(bytes, static_cast<int>(*lane));
    if (!extent.empty()) {
      balance_.took(*lane, bytes);
      return extent;
    }
    refused |= uint64_t{1} << *lane;
  }
}

Extent FileStore::allocate(int64_t bytes) {
  bytes = checked_extent_bytes(bytes);
  if (const Extent extent = place(bytes); !extent.empty()) return extent;
  // A reservation is a promise in bytes: where only fragmentation is in the way, another slab keeps it.
  const MutexLock lock(grow_mutex_);
  Extent extent = place(bytes);
  if (extent.empty() && space_.within_limit(bytes)) {
    add_slab_for(bytes);
    extent = place(bytes);
  }
  if (!extent.empty()) return extent;
  throw no_room(space_, bytes, lanes_.front().folder.path().string());
}

}  // namespace overspill::io
