// Speculation (docs/architecture.md): while backward runs, chunks whose gradients are final are updated as if
// nothing would be clipped, into new extents and a second `hi`. Then step() knows the norm: it takes the new
// version, or drops it and updates anew. A wrong guess costs time and never changes a bit.
//
// This class holds what a guess rests on: which gradients are final (as many arrived as in the last step),
// what the hyper-parameters will be, and memory for the second `hi`. The updater does the work.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/plan/setup.h"

namespace overspill::engine {

class Speculation {
 public:
  Speculation(const Setup& setup, Hardware& hardware, ModelStates& model);

  /// The hyper-parameters that the next step is expected to have.
  void expect(std::span<const optim::Hyper> groups) REQUIRES(engine_mutex);
  /// What the next step is expected to multiply gradients by, before clipping.
  void expect_unscaled(double unscale) REQUIRES(engine_mutex);

  /// A gradient arrived. True when, going by the last step, all gradients of the unit have arrived and its
  /// updates may be guessed; the call then captures its guessed factors.
  bool arrived(int32_t unit, int32_t segment) REQUIRES(engine_mutex);

  /// Gradients were thrown away: counting starts anew.
  void restart() REQUIRES(engine_mutex);

  /// Called when step() has decided: the next step is expected to have the same arrivals. After a miss
  /// guessing pauses, each time twice as long, since a failed guess has read and written for nothing.
  void stepped(bool any_made, bool hit) REQUIRES(engine_mutex);

  /// Whether the factors of the unit are those that were guessed, for every segment.
  bool right(int32_t unit) const REQUIRES(engine_mutex);

  /// Memory for the second `hi` of a chunk; null when all is taken.
  std::byte* take_weights() REQUIRES(engine_mutex);
  void give_back(std::byte* weights) REQUIRES(engine_mutex);

  /// Whether guesses may come.
  bool active() const REQUIRES(engine_mutex) {
    return setup_.config.speculate && setup_.layout.slices == 1 && pause_ == 0 && !groups_.empty();
  }

  bool may_guess(int32_t chunk) const { return engine::may_guess(setup_.plan, chunk); }

 private:
  bool complete(int32_t unit) const REQUIRES(engine_mutex);
  void capture(int32_t unit) REQUIRES(engine_mutex);

  static constexpr int64_t kPauseMost = 64;  // steps

  const Setup& setup_;
  ModelStates& model_;
  HostMemory memory_;
  std::vector<std::byte*> free_ GUARDED_BY(engine_mutex);
  std::vector<optim::Hyper> groups_ GUARDED_BY(engine_mutex);
  /// By unit and segment, since the last step.
  std::vector<std::vector<int32_t>> arrivals_ GUARDED_BY(engine_mutex);
  double unscale_ GUARDED_BY(engine_mutex) = 1;
  std::vector<std::vector<int32_t>> expected_ GUARDED_BY(engine_mutex);  // in the last step
  int64_t next_pause_ GUARDED_BY(engine_mutex) = 1;
  int64_t pause_ GUARDED_BY(engine_mutex) = 0;  // steps during which nothing is guessed
};

}  // namespace overspill::engine
