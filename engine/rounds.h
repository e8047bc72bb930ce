// The ranks' rounds (docs/ranks.md): the one thread of a rank that makes collective calls. Round after round
// all ranks announce where they stand (collectives/agreement.h), draw the same conclusion, and do it: send
// shards to who wants them, sum gradients that everyone has given, meet in step(). The caller's thread makes
// no collective call; it waits for what the rounds bring. So a rank serves the others also while its caller
// computes, evaluates alone, or waits.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "engine/collectives/agreement.h"
#include "engine/gradients.h"
#include "engine/schedule/context.h"
#include "engine/schedule/gather.h"
#include "engine/schedule/updater.h"

namespace overspill::engine {

class Rounds {
 public:
  Rounds(Context& context, Gatherer& gatherer, Updater& updater, Gradients& gradients);
  Rounds(const Rounds&) = delete;
  Rounds& operator=(const Rounds&) = delete;
  ~Rounds();

  /// Starts the thread where there are several ranks: from now on this rank serves the others, and the
  /// destructor waits until all have left.
  void start();

  /// Runs `body` once the callers of all ranks are at this meeting: on the thread of the rounds, all ranks at
  /// once, so it may make collective calls. Returns when it has run here. What it throws ends the world and
  /// fails the engine. With one rank it is run by the caller. `number` differs between two meetings of a
  /// kind.
  template <class Body>
  void meet(Meeting meeting, int64_t number, Body body) {
    if (alone()) return body();
    attend(meeting, static_cast<uint64_t>(number), std::ref(body));
  }

  /// While it lives, no weights of this rank are sent; it begins between two rounds. Whoever changes weights
  /// holds one, on every rank: a version is only gathered once all ranks have changed as often. All ranks
  /// have met before each makes its own, since a rank that changes ahead can no longer send what another
  /// still waits for.
  class Change {
   public:
    Change(Rounds& rounds, std::unique_lock<std::mutex>& lock);
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;
    ~Change() { --rounds_.changing_; }

   private:
    Rounds& rounds_;
  };

  /// On the thread of the rounds: sums what was given and not summed yet.
  void sum_gradients();

  /// Whether the caller is the thread of the rounds: a transport may run other code there, such as a
  /// finalizer of Python.
  bool here() const;

  /// Serves the others until all ranks have left, or the world has ended; then the thread is gone. Not to be
  /// called from that thread.
  void leave() noexcept;
  /// Ends the world now: the others are told why.
  void abort(const char* why) noexcept;

 private:
  struct Call {
    Meeting meeting = Meeting::none;
    uint64_t number = 0;
    std::function<void()> body;
    bool done = false;
  };

  bool alone() const { return context_.layout.slices == 1; }
  void attend(Meeting meeting, uint64_t number, std::function<void()> body);
  void abort_model_ranks(const char* why) noexcept;
  void run() noexcept;
  void round();
  void rest();
  void announce();
  Standing stand() const;
  bool is_so(Say say, int32_t unit, const Standing& own) const;
  bool differs() const;
  void sum(std::span<const int32_t> units);
  void gather(int32_t unit);
  void look_for_hanging_ranks();

  Context& context_;
  Gatherer& gatherer_;
  Updater& updater_;
  Gradients& gradients_;
  Announcements said_;
  Agreement agreement_;
  uint64_t model_ = 0;
  Call* call_ = nullptr;
  uint64_t changes_ = 0;
  std::atomic<int> changing_ = 0;
  int change_waits_ = 0;  // a change waits for the end of the round
  bool in_round_ = false;
  bool leaving_ = false;
  bool over_ = false;
  int idle_rounds_ = 0;
  std::vector<uint64_t> seen_progress_;  // by rank
  std::vector<int64_t> seen_ns_;
  std::vector<uint8_t> gives_;
  std::vector<std::span<const std::byte>> send_;
  std::vector<std::span<std::byte>> receive_;
  std::thread thread_;
};

}  // namespace overspill::engine
