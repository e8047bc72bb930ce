#include "io/balance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "io/store.h"

namespace overspill::io {
namespace {

// A path without room for a while must not be flooded once it has some.
constexpr double kCreditMaxBytes = 64 << 20;

}  // namespace

double step_bytes_per_s(const PathSpeed& speed) {
  if (speed.read_bytes_per_s <= 0 || speed.write_bytes_per_s <= 0) return 0;
  return 1 / (1 / speed.read_bytes_per_s + 1 / speed.write_bytes_per_s);
}

Balance::Balance(size_t paths) : paths_(paths) {
  if (paths > 0 && paths <= kPathsMax) return;
  throw StoreError({.kind = ErrorKind::invalid,
                    .operation = Operation::open,
                    .detail = fmt::format("{} paths were given; 1 to {} are expected", paths, kPathsMax)});
}

bool Balance::close(size_t path) {
  const auto open = std::count_if(paths_.begin(), paths_.end(), [](const Path& one) { return one.open; });
  if (!paths_[path].open || open == 1) return false;
  paths_[path].open = false;
  return true;
}

double Balance::total_weight() const {
  double total = 0;
  for (const Path& path : paths_) total += path.open ? path.weight : 0;
  return total;
}

double Balance::share(size_t path) const {
  return paths_[path].open ? paths_[path].weight / total_weight() : 0;
}

std::optional<size_t> Balance::next(int64_t bytes, uint64_t refused) const {
  const double per_weight = static_cast<double>(bytes) / total_weight();
  std::optional<size_t> best;
  double most = 0;
  for (size_t i = 0; i < paths_.size(); ++i) {
    if (!paths_[i].open || (refused >> i & 1) != 0) continue;
    const double credit = paths_[i].credit_bytes + paths_[i].weight * per_weight;
    if (best && credit <= most) continue;
    best = i;
    most = credit;
  }
  return best;
}

void Balance::took(size_t path, int64_t bytes) {
  const double per_weight = static_cast<double>(bytes) / total_weight();
  for (Path& one : paths_) {
    if (one.open) one.credit_bytes += one.weight * per_weight;
  }
  paths_[path].credit_bytes -= static_cast<double>(bytes);
  for (Path& one : paths_) one.credit_bytes = std::clamp(one.credit_bytes, -kCreditMaxBytes, kCreditMaxBytes);
}

std::vector<int64_t> apportion(int64_t bytes, std::span<const double> weights,
                               std::span<const int64_t> capacities) {
  std::vector<int64_t> parts(weights.size(), 0);
  std::vector<bool> full(weights.size(), false);
  int64_t left = bytes;
  // Each round either fills a path or shares out all that is left.
  for (size_t round = 0; round <= weights.size() && left > 0; ++round) {
    double total = 0;
    for (size_t i = 0; i < weights.size(); ++i) total += full[i] ? 0 : weights[i];
    if (total <= 0) break;
    const int64_t now = left;
    for (size_t i = 0; i < weights.size() && left > 0; ++i) {
      if (full[i] || weights[i] <= 0) continue;
      const int64_t room = capacities[i] / kBlockBytes * kBlockBytes - parts[i];
      const double exact = std::ceil(static_cast<double>(now) * weights[i] / total);
      const int64_t part = std::min(round_up_to_block(static_cast<int64_t>(exact)), round_up_to_block(left));
      full[i] = part >= room;
      parts[i] += std::max(std::min(part, room), int64_t{0});
      left -= std::max(std::min(part, room), int64_t{0});
    }
  }
  return parts;
}

}  // namespace overspill::io
