// The ranks' rounds (docs/ranks.md): the one thread of a rank that makes collective calls. Round after round
// all ranks announce where they stand (ranks/agreement.h), draw the same conclusion, and do it: send shards
// to ranks that want them, sum gradients that every rank has given, meet in step(). The caller's thread makes
// no collective call; it waits for what the rounds bring. So a rank serves the others even while its own
// caller computes, evaluates alone, or waits.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "engine/collectives/rank_groups.h"
#include "engine/core/core.h"
#include "engine/core/demand.h"
#include "engine/gradients/gradients.h"
#include "engine/plan/setup.h"
#include "engine/ranks/agreement.h"
#include "engine/states/updater.h"
#include "engine/weights/gather.h"

namespace overspill::engine {

class Rounds {
 public:
  Rounds(const Setup& setup, Core& core, RankGroups& ranks, Demand& demand, Gatherer& gatherer,
         Updater& updater, Gradients& gradients);
  Rounds(const Rounds&) = delete;
  Rounds& operator=(const Rounds&) = delete;
  ~Rounds();

  /// Starts the thread where there are several ranks: from now on this rank serves the others, and the
  /// destructor waits until all have left.
  void start();

  /// Runs `body` once the callers of all ranks are at this meeting. It runs on the thread of the rounds, on
  /// all ranks at once, so it may make collective calls. meet() returns when it has run here. An exception
  /// from it ends the world and fails the engine. With one rank the caller runs it. `number` tells two
  /// meetings of a kind apart.
  template <class Body>
  void meet(Meeting meeting, int64_t number, Body body) EXCLUDES(engine_mutex) {
    if (alone()) return body();
    attend(meeting, static_cast<uint64_t>(number), std::ref(body));
  }

  /// While it lives, this rank sends no weights; it begins between two rounds. Code that changes weights
  /// holds one, on every rank: a version is gathered only once all ranks have made as many changes. All ranks
  /// meet before each begins its change, since a rank that is ahead can no longer send the version that
  /// another waits for.
  class Change {
   public:
    explicit Change(Rounds& rounds) MAY_RELEASE(engine_mutex);
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;
    ~Change() { --rounds_.changing_; }

   private:
    Rounds& rounds_;
  };

  /// For the thread of the rounds: sums the gradients that were given and not summed yet.
  void sum_gradients() EXCLUDES(engine_mutex);

  /// Whether the caller is the thread of the rounds: a transport may run other code there, such as a
  /// finalizer of Python.
  bool here() const;

  /// Serves the others until all ranks have left, or the world has ended; then the thread is gone. Not to be
  /// called from that thread.
  void leave() noexcept EXCLUDES(engine_mutex);
  /// Ends the world now: the others are told why.
  void abort(const char* why) noexcept EXCLUDES(engine_mutex);

 private:
  struct Call {
    Meeting meeting = Meeting::none;
    uint64_t number = 0;
    std::function<void()> body;
    bool done GUARDED_BY(engine_mutex) = false;
  };

  bool alone() const { return setup_.layout.slices == 1; }
  void attend(Meeting meeting, uint64_t number, std::function<void()> body) EXCLUDES(engine_mutex);
  void abort_model_ranks(const char* why) noexcept;
  void run() noexcept EXCLUDES(engine_mutex);
  void round() EXCLUDES(engine_mutex);
  void unpin_all_but(std::span<const int32_t> units) EXCLUDES(engine_mutex);
  void rest() EXCLUDES(engine_mutex);
  void announce() REQUIRES(engine_mutex);
  Standing stand() const REQUIRES(engine_mutex);
  bool is_so(Say say, int32_t unit, const Standing& own) const REQUIRES(engine_mutex);
  bool differs() const REQUIRES(engine_mutex);
  void sum(std::span<const int32_t> units) EXCLUDES(engine_mutex);
  void note(Happening happening, int32_t unit) EXCLUDES(engine_mutex);
  void gather(std::span<const int32_t> units) EXCLUDES(engine_mutex);
  size_t count_together(std::span<const int32_t> units) const;
  void gather_together(std::span<const int32_t> units) EXCLUDES(engine_mutex);
  void prepare(int32_t unit, Exchange& exchange) EXCLUDES(engine_mutex);
  void look_for_hanging_ranks();

  const Setup& setup_;
  Core& core_;
  RankGroups& ranks_;
  Demand& demand_;
  Gatherer& gatherer_;
  Updater& updater_;
  Gradients& gradients_;
  Announcements said_;
  Agreement agreement_;
  uint64_t model_ = 0;
  Call* call_ GUARDED_BY(engine_mutex) = nullptr;
  uint64_t changes_ GUARDED_BY(engine_mutex) = 0;
  std::atomic<int> changing_ = 0;
  int change_waits_ GUARDED_BY(engine_mutex) = 0;  // a change waits for the end of the round
  bool in_round_ GUARDED_BY(engine_mutex) = false;
  bool leaving_ GUARDED_BY(engine_mutex) = false;
  bool over_ GUARDED_BY(engine_mutex) = false;
  int idle_rounds_ = 0;
  std::vector<uint64_t> seen_progress_;  // by rank
  std::vector<int64_t> seen_ns_;
  std::vector<uint8_t> gives_;
  std::vector<Exchange> exchanges_;  // of units that are gathered together
  std::thread thread_;
};

}  // namespace overspill::engine
