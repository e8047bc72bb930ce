// The lazy update (DESIGN 5): chunks in forward order, each as its states arrive; states read ahead into the
// ring, new versions written behind from there. No thread of its own: it moves on at every completion, and
// when step() or a waiting caller asks. Beside it stand the ring (ring.h), the order of the chunks
// (update_order.h), what a worker does (update_task.h), and what guesses rest on (speculation.h).
//
// Every method needs the context's mutex.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>

#include "engine/schedule/context.h"
#include "engine/schedule/gather.h"
#include "engine/schedule/ring.h"
#include "engine/schedule/speculation.h"
#include "engine/schedule/update_order.h"

namespace overspill::engine {

class Updater final : private StateRing::User {
 public:
  Updater(Context& context, Gatherer& gatherer);
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;

  /// step() has decided: these chunks (in the order given) are updated from now on. All earlier updates are
  /// done. Guesses whose factors were right are taken, all others dropped.
  void schedule(std::span<const int32_t> chunks);
  /// step() has decided that nothing is updated.
  void skip();

  /// The unit's gradients are final as far as anybody knows: its chunks may be updated before step() decides.
  void guess(int32_t unit);
  /// Drops what was guessed for the unit; returns once nobody reads its gradients.
  void take_back(std::unique_lock<std::mutex>& lock, int32_t unit);
  void take_back_all(std::unique_lock<std::mutex>& lock);
  int64_t guesses_unfinished() const;
  Speculation& speculation() { return speculation_; }

  /// Starts whatever can start: reads, updates, read-ahead.
  void pump() override;

  /// Returns once every scheduled update is done and written, and nothing is staged: components may be
  /// reached at their homes. Read-ahead stays off until resume().
  void quiesce(std::unique_lock<std::mutex>& lock);
  void resume() { order_.read_ahead(); }

  /// Returns once the unit's weights are up to date.
  void wait_for(std::unique_lock<std::mutex>& lock, int32_t unit);
  /// Returns once every scheduled update is done; its writes may go on.
  void finish(std::unique_lock<std::mutex>& lock);

 private:
  struct Job;
  void written(int32_t chunk) override;
  bool read_next();
  bool dispatch_next();
  void dispatch(int32_t chunk);
  void run(int32_t chunk) noexcept;
  Job prepare(int32_t chunk);
  void prepare_in_slot(Job& job);
  std::string perform(Job& job);
  void conclude(std::unique_lock<std::mutex>& lock, const Job& job);
  Extents allocate(int32_t chunk);
  void release(const Extents& extents);
  void updated(int32_t chunk);

  bool is_guessed_at_home(int32_t chunk) const { return context_.plan.held_twice[chunk]; }
  bool decide(int32_t chunk, bool right);
  void judge(const ScheduleStats& before);
  void guessed(std::unique_lock<std::mutex>& lock, int32_t chunk, const Extents& fresh);
  void guessed_at_home(int32_t chunk);
  void take(ChunkState& state);
  void drop(ChunkState& state);
  void adopt(ChunkState& state);
  void end_guess(ChunkState& state);

  Context& context_;
  Gatherer& gatherer_;
  Speculation speculation_;
  StateRing ring_;
  UpdateOrder order_;
  int64_t pending_ = 0;  // scheduled updates that are not done
  int running_ = 0;      // handed to the executor
};

}  // namespace overspill::engine
