// The order in which units are acquired, recorded per (training, grad mode) and replayed as a prediction
// (docs/architecture.md).
//
// Every pass is recorded; the last complete recording of the same kind predicts the present one. If a unit
// was not predicted next, the trace looks for it further on in the prediction; if it is not there, it
// predicts nothing until a predicted unit is acquired again. Not thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace overspill::engine {

struct PassKind {
  bool training = true;
  bool grad_enabled = true;
};

class Trace {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  explicit Trace(int32_t units) : units_(units) {}

  /// A forward starts. What was recorded since the last call becomes the prediction for its kind.
  void begin(PassKind kind);

  /// A unit was acquired.
  void acquired(int32_t unit);

  /// How many acquires come before the unit's next one: 0 means it is next; kNever where nothing is
  /// predicted. For a unit not needed again in this pass, the next pass is assumed to be the same.
  int64_t next_use(int32_t unit) const;

  /// The predicted next acquires, at most `count`.
  std::span<const int32_t> upcoming(int64_t count) const;

  /// Units in the order of their first acquire in the last training pass, then those it did not acquire, by
  /// index. Valid until the next call.
  std::span<const int32_t> forward_order();

  int64_t departures() const { return departures_; }

 private:
  struct Recording {
    std::vector<int32_t> sequence;
    std::vector<std::vector<int32_t>> positions;  // by unit, ascending
  };
  static int index(PassKind kind) { return (kind.training ? 2 : 0) + (kind.grad_enabled ? 1 : 0); }
  const Recording& of(PassKind kind) const { return recordings_[index(kind)]; }

  int32_t units_;
  Recording recordings_[4];
  PassKind kind_;
  bool in_pass_ = false;
  bool lost_ = false;     // the last acquire was not predicted
  int64_t position_ = 0;  // next predicted acquire
  std::vector<int32_t> recorded_;
  int64_t departures_ = 0;
  std::vector<int32_t> order_;  // of forward_order()
  std::vector<uint8_t> ordered_;
};

}  // namespace overspill::engine
