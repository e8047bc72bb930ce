// The states of one step, taken chunk by chunk while later steps change them (copy on write): whoever is
// about to change a chunk that the snapshot has not taken yet takes it first. A chunk whose update of the
// marked step is still to come is taken after it.
//
// Threads: a thread that calls take_all(), and the updater's workers.
#pragma once

#include <cstdint>
#include <exception>

#include "engine/core/core.h"
#include "engine/core/model_states.h"

namespace overspill::engine {

class Snapshot {
 public:
  /// Takes the chunks' contents.
  class Taker {
   public:
    /// Once a chunk: its extents will be released by the next update.
    virtual void pin(int32_t chunk) REQUIRES(engine_mutex) = 0;
    /// Once a chunk, after pin(), on any thread; of several chunks at once. Nobody changes the chunk
    /// meanwhile.
    virtual void write(int32_t chunk) EXCLUDES(engine_mutex) = 0;

   protected:
    ~Taker() = default;
  };

  Snapshot(Core& core, ModelStates& model) : core_(core), model_(model) {}
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// From now on the snapshot is of all chunks as they are after their scheduled updates. No guess is open,
  /// and no other snapshot is under way. The taker lives until take_all() has returned or thrown.
  void mark(Taker& taker) REQUIRES(engine_mutex);
  /// Takes what nobody has taken; returns when all is. Throws what pin() or write() threw on any thread, and
  /// EngineFailed; then the rest is given up.
  void take_all() EXCLUDES(engine_mutex);

  /// To be called by a worker before it changes the chunk, or anything that pin() has to see.
  void before_change(int32_t chunk) MAY_RELEASE(engine_mutex);
  /// The chunk's scheduled update is done.
  void updated(int32_t chunk) REQUIRES(engine_mutex);
  /// Returns once nothing is left to take. Where states are changed from outside.
  void wait() MAY_RELEASE(engine_mutex);
  bool under_way() const REQUIRES(engine_mutex) { return left_ > 0; }
  /// Gives up what is left: take_all() throws `error`.
  void fail(std::exception_ptr error) REQUIRES(engine_mutex);

 private:
  void take(int32_t chunk) MAY_RELEASE(engine_mutex);
  bool is_settled(const ChunkState& state) const REQUIRES(engine_mutex);

  Core& core_;
  ModelStates& model_;
  Taker* taker_ GUARDED_BY(engine_mutex) = nullptr;
  int64_t left_ GUARDED_BY(engine_mutex) = 0;    // chunks that are not taken
  int64_t taking_ GUARDED_BY(engine_mutex) = 0;  // of these, being written
  std::exception_ptr error_ GUARDED_BY(engine_mutex);
};

}  // namespace overspill::engine
