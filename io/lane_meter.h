// Measures one path: bytes, transfers in flight, bandwidth, latency. In fixed memory.
//
// Threads: the methods that count are called one at a time (under the queue's lock, where they cost a clock
// and a few additions); read() and speed() may be called from any thread at any time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "io/balance.h"
#include "io/histogram.h"
#include "io/store.h"

namespace overspill::io {

class LaneMeter {
 public:
  using Clock = int64_t (*)();  // ns, never going back

  /// `depth`: pieces that may be in flight at once. `clock`: for tests.
  explicit LaneMeter(int depth, Clock clock = nullptr);

  // The way of a transfer, and of its pieces.
  void pushed(Transfer& transfer);
  void started(const Transfer& transfer);
  void issued(Transfer::Kind kind);
  void returned(Transfer::Kind kind, int64_t bytes);
  void completed(const Transfer& transfer);

  /// Sets a first estimate; measurements replace it.
  void seed(const PathSpeed& speed);
  /// Bytes over the time in which several pieces of this kind were in flight, so a path of which little is
  /// asked does not look slow. The weight of the past halves every few seconds of such time.
  PathSpeed speed() const;

  /// The fields of PathStats that are counted here.
  PathStats read() const;

 private:
  struct Flow {
    int pieces = 0;
    double bytes = 0;  // of pieces that came back while the flow was full,
    double ns = 0;     // and for how long it was; both are halved together
    std::atomic<double> bytes_per_s = 0;
  };
  void pass_time();
  Flow& flow(Transfer::Kind kind) { return flows_[static_cast<size_t>(kind)]; }

  const Clock clock_;
  const int full_pieces_;
  int64_t now_ns_ = 0;
  int pieces_ = 0;
  std::array<Flow, 2> flows_;  // by Transfer::Kind

  std::array<std::atomic<int64_t>, 2> bytes_{};  // by Transfer::Kind
  std::atomic<int64_t> in_flight_ = 0;
  std::atomic<int64_t> in_flight_max_ = 0;
  std::atomic<int64_t> busy_ns_ = 0;
  std::atomic<int64_t> wait_ns_ = 0;
  Histogram demand_reads_;
  Histogram prefetch_reads_;
  Histogram writes_;
};

}  // namespace overspill::io
