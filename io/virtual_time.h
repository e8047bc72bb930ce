// Simulated time, for tests: a wait runs the next event instead of sleeping. So a run on one thread depends
// only on its seed.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <stdexcept>
#include <utility>
#include <vector>

namespace overspill::io {

/// Thrown when no event is pending, or events go on without end: the wait would never end.
class Stalled : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Not thread-safe.
class VirtualTime {
 public:
  int64_t now_us() const { return now_us_; }

  /// `event` runs `delay_us` from now; of two at one time the one made first.
  void after(int64_t delay_us, std::function<void()> event) {
    events_.push({now_us_ + delay_us, made_++, std::move(event)});
  }

  /// Runs the next event. Throws Stalled when there is none, or after more of them than any test has.
  void advance() {
    if (++ran_ > kEventsMax) throw Stalled("events follow one another without end");
    if (events_.empty()) throw Stalled("no event is left, but somebody waits");
    const Event next = events_.top();
    events_.pop();
    now_us_ = next.at_us;
    next.run();
  }

 private:
  struct Event {
    int64_t at_us;
    int64_t number;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return at_us != other.at_us ? at_us > other.at_us : number > other.number;
    }
  };

  static constexpr int64_t kEventsMax = 10'000'000;

  int64_t now_us_ = 0;
  int64_t made_ = 0;
  int64_t ran_ = 0;
  std::priority_queue<Event> events_;
};

}  // namespace overspill::io
