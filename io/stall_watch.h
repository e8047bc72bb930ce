// Watches what disks were asked for and have not answered: says so on stderr after 10 s, after 20 s, 40 s and
// so on, and when they answer again; gives up after a time that the caller sets.
//
// A stall is a path that has said nothing for so long while something is asked of it. One slow request among
// others that are answered is none: whoever waits for it will soon ask for nothing else.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "io/error.h"
#include "io/patience.h"
#include "io/stalls.h"

namespace overspill::io {

/// A request without an answer.
struct Unanswered {
  Operation operation = Operation::read;
  std::string file{};
  int64_t offset_bytes = 0;
  int64_t length_bytes = 0;
  int64_t requests = 1;  // with this one
};

/// Threads: any.
class StallWatch {
 public:
  using Clock = std::function<std::chrono::nanoseconds()>;
  using Say = std::function<void(const std::string& line)>;

  /// Who is asked. The functions are called on the watch's thread, one at a time, until stop() returns.
  struct Party {
    std::string path;
    /// The last answer, or the request where that came later; nothing while nothing is asked. Allocates
    /// nothing.
    std::function<std::optional<std::chrono::nanoseconds>()> silent_since;
    std::function<std::optional<Unanswered>()> unanswered;  // the request that has waited longest
    std::function<void(const Error&)> give_up;              // once
    std::function<void()> tend;                             // at every look
  };

  explicit StallWatch(const StallPolicy& policy, Say say = nullptr, Clock clock = nullptr);
  ~StallWatch();

  /// Before start().
  void add(Party party);
  void start();
  /// Nobody is looked after any more.
  void stop();
  /// To look now.
  void wake();
  /// One look; what the thread does every now and then. For tests with a clock of their own.
  void look();

  /// Of the n-th party.
  StallStats stats(size_t party) const;
  std::shared_ptr<const StallBoard> board() const { return board_; }

  /// fdatasync, watched as a party of its own. Returns its errno, 0 for none. Throws StoreError{stalled} when
  /// the time is over: the call goes on in a thread that nobody waits for.
  int sync_data(int file, const std::string& path);

 private:
  struct State {
    Party party;
    std::chrono::nanoseconds since{-1};
    std::chrono::nanoseconds tell_at{0};  // of silence
    bool given_up = false;
    StallStats stats{};
  };

  void work();
  void look_at(State& state);
  void tell(State& state, std::chrono::nanoseconds silent);
  void told_enough(State& state, std::chrono::nanoseconds now);

  const StallPolicy policy_;
  const Say say_;
  const Clock clock_;
  const std::chrono::nanoseconds pause_;
  const std::shared_ptr<StallBoard> board_ = std::make_shared<StallBoard>();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool woken_ = false;

  std::mutex look_mutex_;  // held while somebody looks
  std::list<State> parties_;
  std::mutex calls_mutex_;          // taken after look_mutex_
  std::list<State> calls_;          // sync_data() under way
  mutable std::mutex stats_mutex_;  // guards the stats in parties_
  std::thread thread_;
};

/// fdatasync, under a watch where there is one. As StallWatch::sync_data.
int sync_data(StallWatch* watch, int file, const std::string& path);

}  // namespace overspill::io
