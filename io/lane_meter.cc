#include "io/lane_meter.h"

#include <algorithm>
#include <chrono>

namespace overspill::io {
namespace {

// With fewer pieces in flight a disk idles between them, because of us.
constexpr int kFullPieces = 4;
constexpr double kSeedNs = 0.1e9;    // an estimate counts as much as this long a measurement
constexpr double kLeastNs = 0.05e9;  // below it nothing is said
constexpr double kMemoryNs = 4e9;    // beyond it the past is halved

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// One writer, so no read-modify-write is needed.
void raise(std::atomic<int64_t>& value, int64_t by) {
  value.store(value.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
}

}  // namespace

LaneMeter::LaneMeter(int depth, Clock clock)
    : clock_(clock != nullptr ? clock : &steady_ns), full_pieces_(std::min(depth, kFullPieces)) {}

void LaneMeter::pushed(Transfer& transfer) {
  transfer.pushed_ns = clock_();
  raise(in_flight_, 1);
  in_flight_max_.store(
      std::max(in_flight_max_.load(std::memory_order_relaxed), in_flight_.load(std::memory_order_relaxed)),
      std::memory_order_relaxed);
}

void LaneMeter::started(const Transfer& transfer) {
  raise(wait_ns_, clock_() - transfer.pushed_ns);
}

void LaneMeter::pass_time() {
  const int64_t now = clock_();
  const int64_t passed = now - now_ns_;
  now_ns_ = now;
  if (pieces_ == 0) return;
  raise(busy_ns_, passed);
  for (Flow& one : flows_) {
    if (one.pieces >= full_pieces_) one.ns += static_cast<double>(passed);
  }
}

void LaneMeter::issued(Transfer::Kind kind) {
  pass_time();
  ++pieces_;
  ++flow(kind).pieces;
}

void LaneMeter::returned(Transfer::Kind kind, int64_t bytes) {
  pass_time();
  --pieces_;
  Flow& one = flow(kind);
  const bool full = one.pieces-- >= full_pieces_;
  if (!full) return;
  one.bytes += static_cast<double>(bytes);
  if (one.ns >= kLeastNs && one.bytes > 0)
    one.bytes_per_s.store(one.bytes / one.ns * 1e9, std::memory_order_relaxed);
  if (one.ns >= kMemoryNs) {
    one.ns /= 2;
    one.bytes /= 2;
  }
}

void LaneMeter::completed(const Transfer& transfer) {
  raise(in_flight_, -1);
  if (transfer.error) return;
  raise(bytes_[static_cast<size_t>(transfer.kind)], transfer.extent.bytes);
  const int64_t ns = clock_() - transfer.pushed_ns;
  if (transfer.kind == Transfer::Kind::write) {
    writes_.add(ns);
  } else {
    (transfer.priority == Transfer::Priority::demand ? demand_reads_ : prefetch_reads_).add(ns);
  }
}

void LaneMeter::seed(const PathSpeed& speed) {
  const auto set = [&](Transfer::Kind kind, double bytes_per_s) {
    Flow& one = flow(kind);
    one.ns = bytes_per_s > 0 ? kSeedNs : 0;
    one.bytes = bytes_per_s * kSeedNs / 1e9;
    one.bytes_per_s.store(bytes_per_s, std::memory_order_relaxed);
  };
  set(Transfer::Kind::read, speed.read_bytes_per_s);
  set(Transfer::Kind::write, speed.write_bytes_per_s);
}

PathSpeed LaneMeter::speed() const {
  return {flows_[static_cast<size_t>(Transfer::Kind::read)].bytes_per_s.load(std::memory_order_relaxed),
          flows_[static_cast<size_t>(Transfer::Kind::write)].bytes_per_s.load(std::memory_order_relaxed)};
}

PathStats LaneMeter::read() const {
  PathStats stats;
  stats.bytes_read = bytes_[static_cast<size_t>(Transfer::Kind::read)].load(std::memory_order_relaxed);
  stats.bytes_written = bytes_[static_cast<size_t>(Transfer::Kind::write)].load(std::memory_order_relaxed);
  stats.in_flight = in_flight_.load(std::memory_order_relaxed);
  stats.in_flight_max = in_flight_max_.load(std::memory_order_relaxed);
  stats.busy_ns = busy_ns_.load(std::memory_order_relaxed);
  stats.wait_ns = wait_ns_.load(std::memory_order_relaxed);
  const PathSpeed measured = speed();
  stats.read_bytes_per_s = measured.read_bytes_per_s;
  stats.write_bytes_per_s = measured.write_bytes_per_s;
  stats.demand_reads = demand_reads_.stats();
  stats.prefetch_reads = prefetch_reads_.stats();
  stats.writes = writes_.stats();
  return stats;
}

}  // namespace overspill::io
