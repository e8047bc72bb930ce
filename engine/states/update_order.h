// Decides which chunk is read next, and which is updated next. Chunks that a caller waits for come first,
// then the step's chunks in the order of step(), then guesses, then the chunks that the next step will need
// first.
//
// It looks at the chunks' states and changes none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/core/demand.h"
#include "engine/core/model_states.h"
#include "engine/plan/setup.h"
#include "engine/states/ring.h"
#include "engine/states/speculation.h"

namespace overspill::engine {

class UpdateOrder {
 public:
  /// Only the constructor allocates. The arguments outlive the object.
  UpdateOrder(const Setup& setup, const ModelStates& model, const Demand& demand,
              const Speculation& speculation, const StateRing& ring);

  /// step() is about to add its chunks; those of the step before are done.
  void begin_step() REQUIRES(engine_mutex);
  /// Called for each chunk of the step, in the order of the update. `add`: the chunk has to be updated (its
  /// guess was not taken). `expect_again`, for every chunk: the next step will probably update it, too.
  void add(int32_t chunk) REQUIRES(engine_mutex);
  void expect_again(int32_t chunk) REQUIRES(engine_mutex);
  /// The chunk's guess is taken: its weights have to be copied to their home.
  void add_taken(int32_t chunk) REQUIRES(engine_mutex) { on_host_.push_back(chunk); }
  /// A chunk on the host has to be updated after all, and its turn may have passed.
  void add_next(int32_t chunk) REQUIRES(engine_mutex);

  /// The chunk's update may be guessed.
  void add_guess(int32_t chunk) REQUIRES(engine_mutex);
  /// Chunks added by add_guess() since the last step.
  std::span<const int32_t> guesses() const REQUIRES(engine_mutex) { return guesses_; }
  /// step() has decided on all guesses.
  void end_guesses() REQUIRES(engine_mutex);

  void stop_reading_ahead() REQUIRES(engine_mutex) { reads_ahead_ = false; }
  /// The chunks read ahead are gone: reading ahead begins anew with the next step's first chunk.
  void start_ahead_anew() REQUIRES(engine_mutex) { next_ahead_ = 0; }
  void read_ahead() REQUIRES(engine_mutex) { reads_ahead_ = setup_.config.prefetch_units > 0; }

  /// The chunk to read, or to update, next; -1: none. A read-ahead chunk is returned only while a slot is
  /// free.
  int32_t next_to_read() REQUIRES(engine_mutex);
  int32_t next_to_update() REQUIRES(engine_mutex);

 private:
  template <class Fits>
  int32_t first_demanded(Fits fits) const REQUIRES(engine_mutex);
  bool has_to_be_read(int32_t chunk) const REQUIRES(engine_mutex);
  int32_t next_guess_to_read() REQUIRES(engine_mutex);
  int32_t next_ahead() REQUIRES(engine_mutex);
  bool can_be_updated(int32_t chunk) const REQUIRES(engine_mutex);

  const Setup& setup_;
  const ModelStates& model_;
  const Demand& demand_;
  const Speculation& speculation_;
  const StateRing& ring_;
  std::vector<int32_t> through_ring_ GUARDED_BY(engine_mutex);  // the step's chunks that need a slot
  std::vector<int32_t> on_host_ GUARDED_BY(engine_mutex);       // the step's chunks wholly on the host
  /// The last step's through_ring_, with those that were guessed.
  std::vector<int32_t> ahead_ GUARDED_BY(engine_mutex);
  /// Chunks whose updates may be guessed, since the last step.
  std::vector<int32_t> guesses_ GUARDED_BY(engine_mutex);
  std::vector<int32_t> guessed_ GUARDED_BY(engine_mutex);  // the last step's guesses_ that NVMe has part of
  /// Of guesses_, those whose states may have to be read yet.
  std::vector<int32_t> unread_guesses_ GUARDED_BY(engine_mutex);
  /// Of guesses_, those of chunks wholly on the host, to be made yet.
  std::vector<int32_t> home_guesses_ GUARDED_BY(engine_mutex);
  size_t next_through_ring_ GUARDED_BY(engine_mutex) = 0;
  size_t next_on_host_ GUARDED_BY(engine_mutex) = 0;
  size_t next_ahead_ GUARDED_BY(engine_mutex) = 0;  // in ahead_ or guessed_
  bool reads_ahead_ GUARDED_BY(engine_mutex) = false;
};

}  // namespace overspill::engine
