// Units that live on the device (Plan::on_device): weights, states and gradients in flight stay in its
// memory, and are updated there (DESIGN 5). They are the first units of forward, whose updates have nothing
// to hide under. No byte of theirs crosses the link in a step, but for the sums of squares.
//
// Of several ranks each holds its shard there. Gradients are summed on the device (device_sums.h) and the sum
// stays; weights are gathered beside the shard (Gatherer), which copies it there as it is on the host for
// other units.
//
// One stream does what is asked, in that order: a gradient comes in after the update that used the one
// before, and is squared then (gradient_squares.h), under backward; states are read after their update.
// Callers' queues wait for the update as they wait for a copy, and the update waits for what they were given
// while they held a lease. So step() only submits.
//
// The engine's mutex is given up for waits, and for submitting copies of host memory that nobody pinned, for
// which a device may keep the thread. What fails on the device fails the engine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/core/block.h"
#include "engine/core/core.h"
#include "engine/core/hardware.h"
#include "engine/core/model_states.h"
#include "engine/device/gradient_squares.h"
#include "engine/plan/setup.h"
#include "kernels/device_kernels.h"

namespace overspill::engine {

class DeviceUnits {
 public:
  /// All weights, states and gradients are zero.
  DeviceUnits(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model,
              GradientSquares& squares);
  ~DeviceUnits();  // no lease is left; waits for what is under way
  DeviceUnits(const DeviceUnits&) = delete;
  DeviceUnits& operator=(const DeviceUnits&) = delete;
  /// Waits for what was started.
  void settle() noexcept;

  /// Leases the unit's weights, of a world of one rank; Gatherer::release ends it.
  Block* lease(int32_t unit) REQUIRES(engine_mutex);

  // ---- gradients of one rank, of a segment: the first of a step replaces what is there, later ones are
  // added

  bool take_gradients(int32_t unit) const { return setup_.gradient_route(unit) == GradientRoute::device; }

  struct Arrival {
    int32_t unit = -1;
    int32_t segment = -1;
    optim::Element element{};
    bool first = false;
  };
  /// Of the device's memory, once `ready` is reached. It is taken in when the event is done.
  kernels::Event take_in(const Arrival& arrival, const std::byte* data, const kernels::Event& ready)
      REQUIRES(engine_mutex);
  /// Elements from `begin` on, of host memory; returns when they are there.
  void take_in(const Arrival& arrival, int64_t begin, int64_t elements, const std::byte* data)
      MAY_RELEASE(engine_mutex);
  /// Copies elements of the segment's gradient out as they are kept, from `begin` on.
  void read_gradient(int32_t unit, int32_t segment, int64_t begin, std::span<std::byte> out)
      MAY_RELEASE(engine_mutex);

  // ---- gradients of several ranks

  /// This rank's elements of a chunk, where their sum belongs, once the event is reached.
  std::byte* place_of_gradient(int32_t chunk) const;
  kernels::Event used(int32_t unit) const REQUIRES(engine_mutex) { return residents_[unit].block.copied; }
  /// The sum is there. It has been squared when the event is done.
  kernels::Event square_sums(int32_t unit) REQUIRES(engine_mutex);

  // ---- the update

  /// Submits it: segments, factors and step counts are those that step() has captured.
  void update(int32_t unit) REQUIRES(engine_mutex);
  /// Returns when all that was submitted is done.
  void finish() MAY_RELEASE(engine_mutex);

  // ---- access from outside: one chunk's component at a time

  void read(int32_t chunk, Component component, std::span<std::byte> to) MAY_RELEASE(engine_mutex);
  void write(int32_t chunk, Component component, std::span<const std::byte> from) MAY_RELEASE(engine_mutex);

 private:
  struct Resident {
    std::array<std::byte*, kComponents> components{};  // of this rank's shard, chunk by chunk
    std::byte* gradients = nullptr;                    // of its elements
    Block block;  // of its weights, for leases; `copied`: their update, or what replaced them
  };

  std::byte* place_of(int32_t chunk, Component component) const;
  void update_piece(int32_t chunk, int64_t elements) REQUIRES(engine_mutex);
  /// Of its first element, which may be another rank's and lie elsewhere.
  std::byte* gradient_of(int32_t unit, int32_t segment);
  void take_squares(int32_t unit, int32_t segment);
  void wait_for_uses(Block& block) REQUIRES(engine_mutex);
  void wait(const kernels::Event& event) MAY_RELEASE(engine_mutex);

  const Setup& setup_;
  Core& core_;
  ModelStates& model_;
  GradientSquares& squares_;
  kernels::DeviceKernels* kernels_ = nullptr;
  kernels::DeviceMemory memory_;
  int64_t piece_elements_ = 0;       // of the largest chunk
  std::byte* piece_ = nullptr;       // of a gradient, from the host
  std::vector<Resident> residents_;  // by unit; empty: none lives there
  std::unique_ptr<kernels::Stream> stream_;
};

}  // namespace overspill::engine
