// What works for a simulated schedule (simulate.h), and time, which passes from event to event.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "engine/plan/simulate.h"

namespace overspill::engine {

class Lanes {
 public:
  explicit Lanes(const Rates& rates) : rates_(rates) {}

  /// `seconds`: on the lane alone. `done` is called when they are over; it may ask for more. Of what waits
  /// for a lane the smallest urgency goes first, then what was asked for first.
  void ask(Lane lane, double seconds, int64_t urgency, std::function<void()> done);
  /// The same of bytes; of none, `done` is called at once. Throws std::invalid_argument where the lane has no
  /// speed.
  void move(Lane lane, double bytes, int64_t urgency, std::function<void()> done);

  /// Passes time until the next item is done, and calls its `done`. False: no lane has anything to do.
  bool pass();
  double now() const { return now_; }
  double busy_s(Lane lane) const { return busy_s_[static_cast<size_t>(lane)]; }
  double bytes(Lane lane) const { return bytes_[static_cast<size_t>(lane)]; }

 private:
  struct Item {
    double seconds;
    std::function<void()> done;
  };
  struct Queue {
    std::map<std::pair<int64_t, int64_t>, Item> waiting;  // by urgency, then by number
    bool busy = false;
    Item served{};
  };
  std::array<double, kLanes> speeds() const;
  bool busy(Lane lane) const { return queues_[static_cast<size_t>(lane)].busy; }

  const Rates rates_;
  std::array<Queue, kLanes> queues_;
  std::array<double, kLanes> busy_s_{};
  std::array<double, kLanes> bytes_{};
  double now_ = 0;
  int64_t asked_ = 0;
};

}  // namespace overspill::engine
