#include "engine/memory/lease_places.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace overspill::engine {
namespace {

struct Division {
  size_t own = 0;  // of the largest units, which have places of their own
  int64_t bytes = 0;
};

/// The one that needs the least. `sizes` are sorted, the largest one first.
Division divide(const std::vector<int64_t>& sizes, size_t at_once) {
  Division best{sizes.size(), std::accumulate(sizes.begin(), sizes.end(), int64_t{0})};
  int64_t before = 0;
  for (size_t own = 0; own < std::min(at_once, sizes.size()); ++own) {
    const int64_t bytes = before + static_cast<int64_t>(at_once) * sizes[own];
    if (bytes < best.bytes) best = {own, bytes};
    before += sizes[own];
  }
  return best;
}

}  // namespace

int64_t LeasePlaces::least_bytes(std::vector<int64_t> sizes, size_t at_once) {
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  return divide(sizes, at_once).bytes;
}

LeasePlaces::LeasePlaces(const std::vector<int64_t>& sizes, size_t at_once, int64_t arena_bytes)
    : places_(sizes.size()) {
  std::vector<size_t> order;
  for (size_t u = 0; u < sizes.size(); ++u) {
    if (sizes[u] > 0) order.push_back(u);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<int64_t> sorted;
  for (size_t u : order) sorted.push_back(sizes[u]);
  const int64_t all = std::accumulate(sorted.begin(), sorted.end(), int64_t{0});
  const size_t own = all <= arena_bytes ? sorted.size() : divide(sorted, at_once).own;
  int64_t begin = 0;
  for (size_t i = 0; i < own; ++i) {
    places_[order[i]] = {begin, begin + sorted[i], 0};
    begin += sorted[i];
  }
  if (own == sorted.size()) return;
  // Of n blocks of a cell's size, n - 1 leave n gaps, and one of them is long enough.
  const int64_t any_position = static_cast<int64_t>(2 * at_once - 1) * sorted[own];
  const int64_t cell = arena_bytes - begin >= any_position ? 0 : sorted[own];
  for (size_t i = own; i < sorted.size(); ++i) places_[order[i]] = {begin, arena_bytes, cell};
}

bool LeasePlaces::has(int32_t unit, int64_t offset, int64_t bytes) const {
  const Place& place = of(unit);
  if (offset < place.begin || offset + bytes > place.end) return false;
  const int64_t from = offset - place.begin;
  return place.cell == 0 || from / place.cell == (from + bytes - 1) / place.cell;
}

}  // namespace overspill::engine
