// The lazy update (docs/architecture.md): updates chunks in forward order, each when its states have arrived.
// It reads states ahead into the ring and writes new versions back from there. It has no thread: it moves on
// at every completion, and when step() or a waiting caller calls it. Its parts: the ring (ring.h), the order
// of the chunks (update_order.h), the work of a worker (update_task.h), the basis of guesses (speculation.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "engine/core/core.h"
#include "engine/core/demand.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/plan/setup.h"
#include "engine/states/ring.h"
#include "engine/states/snapshot.h"
#include "engine/states/speculation.h"
#include "engine/states/update_order.h"
#include "engine/weights/gather.h"

namespace overspill::engine {

class Updater final : private StateRing::User {
 public:
  Updater(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, Demand& demand,
          Gatherer& gatherer, Snapshot& snapshot);
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;

  /// step() has decided: these chunks (in the order given) are updated from now on. All earlier updates must
  /// be done. It takes the guesses whose factors were right, and drops all others.
  void schedule(std::span<const int32_t> chunks) REQUIRES(engine_mutex);
  /// step() has decided that nothing is updated.
  void skip() REQUIRES(engine_mutex);

  /// The unit's gradients seem final: its chunks may be updated before step() decides.
  void guess(int32_t unit) REQUIRES(engine_mutex);
  /// Drops the unit's guesses; returns once no worker reads its gradients.
  void take_back(int32_t unit) MAY_RELEASE(engine_mutex);
  void take_back_all() MAY_RELEASE(engine_mutex);
  int64_t guesses_unfinished() const REQUIRES(engine_mutex);
  Speculation& speculation() { return speculation_; }

  /// Starts whatever can start: reads, updates, read-ahead.
  void pump() REQUIRES(engine_mutex) override;

  /// Returns once every scheduled update is done and written, no slot holds states, and no snapshot is under
  /// way: components may then be accessed at their homes. Read-ahead stays off until resume().
  void quiesce() MAY_RELEASE(engine_mutex);
  void resume() REQUIRES(engine_mutex) { order_.read_ahead(); }

  /// Returns once the unit's weights are up to date.
  void wait_for(int32_t unit) MAY_RELEASE(engine_mutex);
  /// Returns once every scheduled update is done; its writes may go on.
  void finish() MAY_RELEASE(engine_mutex);

 private:
  struct Job;
  void written(int32_t chunk) REQUIRES(engine_mutex) override;
  bool read_next() REQUIRES(engine_mutex);
  bool dispatch_next() REQUIRES(engine_mutex);
  void dispatch(int32_t chunk) REQUIRES(engine_mutex);
  void run(int32_t chunk) noexcept EXCLUDES(engine_mutex);
  Job prepare(int32_t chunk) REQUIRES(engine_mutex);
  void prepare_in_slot(Job& job) REQUIRES(engine_mutex);
  std::string perform(Job& job) MAY_RELEASE(engine_mutex);
  void conclude(const Job& job) MAY_RELEASE(engine_mutex);
  Extents allocate(int32_t chunk) EXCLUDES(engine_mutex);
  void release(const Extents& extents);
  void updated(int32_t chunk) REQUIRES(engine_mutex);

  bool is_guessed_at_home(int32_t chunk) const { return setup_.plan.held_twice[chunk]; }
  bool decide(int32_t chunk, bool right) REQUIRES(engine_mutex);
  void judge(const ScheduleStats& before) REQUIRES(engine_mutex);
  void guessed(int32_t chunk, const Extents& fresh) MAY_RELEASE(engine_mutex);
  void guessed_at_home(int32_t chunk) REQUIRES(engine_mutex);
  void take(ChunkState& state) REQUIRES(engine_mutex);
  void drop(ChunkState& state) REQUIRES(engine_mutex);
  void adopt(ChunkState& state) REQUIRES(engine_mutex);
  void end_guess(ChunkState& state) REQUIRES(engine_mutex);

  const Setup& setup_;
  Core& core_;
  Hardware& hardware_;
  ModelStates& model_;
  Demand& demand_;
  Gatherer& gatherer_;
  Snapshot& snapshot_;
  Speculation speculation_;
  StateRing ring_;
  UpdateOrder order_;
  int64_t pending_ GUARDED_BY(engine_mutex) = 0;  // scheduled updates that are not done
  int running_ GUARDED_BY(engine_mutex) = 0;      // handed to the executor
};

}  // namespace overspill::engine
