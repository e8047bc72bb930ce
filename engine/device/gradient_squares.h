// Sums of squares of gradients, computed when a gradient arrives: by the worker that adds a piece, or by the
// device before a gradient leaves it. So step() finds them ready and needs no pass over all gradients. Only a
// gradient that was not squared, or has changed since, is read by step().
//
// They are kept per run of each chunk, as the summary adds them up (optim::Squares), so the bits do not
// depend on who computed them.
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

/// One thread at a time writes the squares of a segment, or several threads in parallel those of different
/// runs.
class GradientSquares {
 public:
  GradientSquares(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model);
  ~GradientSquares();  // waits for what fetch() has begun
  GradientSquares(const GradientSquares&) = delete;
  GradientSquares& operator=(const GradientSquares&) = delete;
  /// Waits for what was started.
  void settle() noexcept;

  /// Whether the device squares the unit's gradients.
  bool taken_there(int32_t unit) const;
  /// Puts on `stream` that the device squares a segment's gradient, which lies whole at `gradient` there.
  /// The caller waits for the stream before fetch().
  void take_there(kernels::Stream& stream, int32_t unit, int32_t segment, optim::Element type,
                  const std::byte* gradient);
  /// The same on a stream of its own, once `ready` is reached; the event is reached when it is done.
  kernels::Event take_there(const kernels::Event& ready, int32_t unit, int32_t segment, optim::Element type,
                            const std::byte* gradient);
  /// Sets the squares of one run's present gradient.
  void put(int32_t chunk, int32_t run, const optim::Squares& squares) {
    of_[chunk][run] = {Taken::here, squares};
  }
  /// The run's gradient changes.
  void forget(int32_t chunk, int32_t run) { of_[chunk][run].taken = Taken::no; }

  /// Copies the device's sums to the host. A device that fails fails the engine.
  void fetch() MAY_RELEASE(engine_mutex);
  /// The squares of a run; nothing where they are not known.
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
