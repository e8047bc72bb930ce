// Units that live on the device (Plan::on_device): their weights, states and gradients stay in its memory,
// and the device updates them (docs/architecture.md). They are the first units of forward, whose updates no
// compute hides. In a step only their sums of squares cross the link.
//
// With several ranks each device holds its rank's shard. Gradients are summed on the device (device_sums.h)
// and the sum stays there. The Gatherer gathers weights into a block beside the shard, as it does on the host
// for other units.
//
// One stream does all work in the order submitted: it takes a gradient in after the update that used the
// previous one, and squares it then, during backward (gradient_squares.h); it reads states after their
// update. Callers' queues wait for the update as they wait for a copy, and the update waits for the work that
// they were given during a lease. So step() only submits.
//
// Methods give up the engine's mutex while they wait, and while they submit copies of unpinned host memory,
// which may block the thread. A failure on the device fails the engine.
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
  /// Sets all weights, states and gradients to zero.
  DeviceUnits(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model,
              GradientSquares& squares);
  ~DeviceUnits();  // no lease is left; waits for what is under way
  DeviceUnits(const DeviceUnits&) = delete;
  DeviceUnits& operator=(const DeviceUnits&) = delete;
  /// Waits for what was started.
  void settle() noexcept;

  /// Leases the unit's weights, with one rank only; Gatherer::release ends the lease.
  Block* lease(int32_t unit) REQUIRES(engine_mutex);

  // ---- gradients with one rank, by segment: the first of a step replaces the old one, later ones are added

  bool take_gradients(int32_t unit) const { return setup_.gradient_route(unit) == GradientRoute::device; }

  struct Arrival {
    int32_t unit = -1;
    int32_t segment = -1;
    optim::Element element{};
    bool first = false;
  };
  /// Takes in a gradient from device memory, once `ready` is reached. It is in when the event is reached.
  kernels::Event take_in(const Arrival& arrival, const std::byte* data, const kernels::Event& ready)
      REQUIRES(engine_mutex);
  /// Takes in elements from `begin` on from host memory; returns when they are on the device.
  void take_in(const Arrival& arrival, int64_t begin, int64_t elements, const std::byte* data)
      MAY_RELEASE(engine_mutex);
  /// Copies elements of the segment's gradient from `begin` on into `out`, in their stored type.
  void read_gradient(int32_t unit, int32_t segment, int64_t begin, std::span<std::byte> out)
      MAY_RELEASE(engine_mutex);

  // ---- gradients of several ranks

  /// This rank's elements of a chunk, where their sum belongs, once the event is reached.
  std::byte* place_of_gradient(int32_t chunk) const;
  kernels::Event used(int32_t unit) const REQUIRES(engine_mutex) { return residents_[unit].block.copied; }
  /// Called when the unit's sum is there: squares it. Done when the event is reached.
  kernels::Event square_sums(int32_t unit) REQUIRES(engine_mutex);

  // ---- the update

  /// Submits the update, with the segments, factors and step counts that step() has captured.
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
