// Watches the requests that disks have not answered. It names a disk on stderr after 10 s of silence, then
// after 20 s, 40 s and so on, and says when the disk answers again. After a time that the caller sets it
// gives up.
//
// A path stalls when it has open requests and answers none of them for so long. A single slow request is no
// stall while the path answers others. Whoever waits for that request soon sends no others, and then its
// silence counts.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "io/error.h"
#include "io/patience.h"
#include "io/stalls.h"
#include "io/store_stats.h"

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
    /// When the path last answered, or when the oldest open request was made, whichever is later. Nothing
    /// while no request is open. Allocates no memory.
    std::function<std::optional<std::chrono::nanoseconds>()> silent_since;
    std::function<std::optional<Unanswered>()> unanswered;  // the request that has waited longest
    std::function<void(const Error&)> give_up;              // called once, when the time is over; or null
    std::function<void()> tend;                             // called at every look
  };

  explicit StallWatch(const StallPolicy& policy, Say say = nullptr, Clock clock = nullptr);
  ~StallWatch();

  /// Before start().
  void add(Party party) EXCLUDES(look_mutex_);
  /// Throws StoreError where there is no thread to be had.
  void start();
  /// Ends the thread: the parties' functions are not called any more. The board keeps what was given up, and
  /// no other stall.
  void stop() EXCLUDES(look_mutex_);
  /// Makes the thread look now.
  void wake();
  /// Looks at every party once, as the thread does again and again. Public for tests with their own clock.
  void look() EXCLUDES(look_mutex_, calls_mutex_);

  /// Of the party that was added as the n-th, from 0.
  StallStats stats(size_t party) const;
  std::shared_ptr<const StallBoard> board() const { return board_; }

  /// A system call on a file: its errno, 0 for none. It holds no memory of the caller's.
  using Call = std::function<int(int file)>;
  /// Makes `make(file)`, watched as a party of its own, and returns what it returns. Throws
  /// StoreError{stalled} when the time is over: the call then goes on, with a descriptor of its own, in a
  /// thread that nobody waits for.
  int call(Operation operation, int file, const std::string& path, const Call& make);

  class Progress;

 private:
  class WatchedCall;
  struct State {
    Party party;
    std::chrono::nanoseconds since{-1};
    std::chrono::nanoseconds tell_at{0};  // of silence
    bool given_up = false;
    mutable Mutex stats_mutex;  // of its own: look_mutex_ is held while a disk hangs
    StallStats stats GUARDED_BY(stats_mutex){};
  };

  /// Of one call or one piece of work: `path` is what is asked and what it is asked of.
  static Party party_of(Operation operation, const std::string& path,
                        std::function<std::optional<std::chrono::nanoseconds>()> silent_since,
                        std::function<void(const Error&)> give_up);
  bool gives_up(const State& state) const;

  void work();
  const State& party(size_t number) const;
  void look_at(State& state);
  void tell(State& state, std::chrono::nanoseconds silent);
  void told_enough(State& state, std::chrono::nanoseconds now);
  void forget_stall(State& state);

  const StallPolicy policy_;
  const Say say_;
  const Clock clock_;
  const std::chrono::nanoseconds pause_;
  const std::shared_ptr<StallBoard> board_ = std::make_shared<StallBoard>();

  mutable Mutex mutex_;
  Condition changed_;
  bool stopping_ GUARDED_BY(mutex_) = false;
  bool woken_ GUARDED_BY(mutex_) = false;

  Mutex look_mutex_;  // held while somebody looks
  std::list<State> parties_ GUARDED_BY(look_mutex_);
  Mutex calls_mutex_ ACQUIRED_AFTER(look_mutex_);
  std::list<State> calls_ GUARDED_BY(calls_mutex_);  // call() and Progress under way
  std::thread thread_;
};

/// Watches work of many calls on one file or folder while it lives: the work stalls if moved() is not called
/// for so long. The watch names it and never gives it up, since its calls use memory of the caller's.
/// Threads: moved() from any.
class StallWatch::Progress {
 public:
  /// Does nothing where `watch` is null.
  Progress(StallWatch* watch, Operation operation, const std::string& path);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void moved();

 private:
  struct Since;

  StallWatch* const watch_;
  std::shared_ptr<Since> since_;
  std::unique_ptr<WatchedCall> watched_;
};

/// As StallWatch::call; with `watch` null the call is not watched.
int watched(StallWatch* watch, Operation operation, int file, const std::string& path,
            const StallWatch::Call& make);

/// The same: fdatasync, fsync, syncfs (of the file system that has the file).
int sync_data(StallWatch* watch, int file, const std::string& path);
int sync_file(StallWatch* watch, int file, const std::string& path);
int sync_file_system(StallWatch* watch, int file, const std::string& path);

}  // namespace overspill::io
