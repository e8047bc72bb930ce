// Sums of squares of gradients, taken while the gradients come and are at hand: by the worker that adds a
// piece, or by the device before a gradient leaves it. So step() finds them, and no pass over all gradients
// stands between backward and the update. Nothing is known of a gradient that nobody has squared, or that
// has changed since: step() reads it then.
//
// All are kept by run of each chunk, as the summary adds them up (optim::Squares), so it makes no difference
// to any bit who took them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cpu_optim/gradient.h"
#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/plan/setup.h"
#include "kernels/device_kernels.h"

namespace overspill::engine {

/// A segment's are written by one thread at a time; different runs' by several side by side.
class GradientSquares {
 public:
  GradientSquares(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model);
  ~GradientSquares();  // waits for what fetch() has begun
  GradientSquares(const GradientSquares&) = delete;
  GradientSquares& operator=(const GradientSquares&) = delete;
  /// Waits for what was started.
  void settle() noexcept;

  /// Whether the device takes those of the unit's gradients.
  bool taken_there(int32_t unit) const;
  /// Puts on `stream` that the device squares a segment's gradient, which lies whole at `gradient` there.
  /// The caller waits for the stream before fetch().
  void take_there(kernels::Stream& stream, int32_t unit, int32_t segment, optim::Element type,
                  const std::byte* gradient);
  /// The same, beside all other streams, once `ready` is reached; the event is done when they are taken.
  kernels::Event take_there(const kernels::Event& ready, int32_t unit, int32_t segment, optim::Element type,
                            const std::byte* gradient);
  /// Of one run, as it is now.
  void put(int32_t chunk, int32_t run, const optim::Squares& squares) {
    of_[chunk][run] = {Taken::here, squares};
  }
  /// The run's gradient changes.
  void forget(int32_t chunk, int32_t run) { of_[chunk][run].taken = Taken::no; }

  /// Brings what the device has to the host. A device that fails fails the engine.
  void fetch() MAY_RELEASE(engine_mutex);
  /// Nothing where it is not known.
  std::optional<optim::Squares> of(int32_t chunk, size_t run) const;

 private:
  enum class Taken : uint8_t { no, here, there };
  struct OfRun {
    Taken taken = Taken::no;
    optim::Squares squares;  // taken here
  };

  optim::Squares from_device(int32_t chunk, size_t run) const;

  const Setup& setup_;
  Core& core_;
  Hardware& hardware_;
  std::vector<std::vector<OfRun>> of_;             // by chunk and run
  kernels::DeviceMemory memory_;                   // block by block of each run (kernels::Squares)
  LinkedMemory copy_;                              // the same, on the host
  std::vector<std::vector<int64_t>> first_block_;  // by chunk and run; empty: not taken there
  std::unique_ptr<kernels::Stream> stream_;        // null: the device takes none
};

}  // namespace overspill::engine
