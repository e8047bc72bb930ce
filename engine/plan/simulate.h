// Simulates steps under a plan: the engine's schedule over rates of a machine, in place of the machine. A
// pure function: it says what a step would take on hardware that is not there, or with sizes that nobody has
// run.
//
// What works for the schedule is a lane: the caller's compute, the workers of the update, reads and writes of
// the disks, both ways of the link to a device, the network. A lane does one thing at a time, the most urgent
// first. Lanes that share something slow each other down: reads and writes share the disks, and all that
// needs the processor shares that. Between two events all speeds are constant, so time passes from event to
// event (a fluid model: Anick, Mitra and Sondhi 1982, "Stochastic theory of a data-handling system with
// multiple sources", without their randomness).
//
// The schedule is the one of docs/step.md: updates of the last step run under forward, in the order of use,
// through the slots of the ring; what the ring reads ahead and writes behind runs under backward; a use waits
// for its unit's updates and for its weights, which are read, collected from the ranks and copied to the
// device up to `prefetch_units` uses ahead, as far as the arena has room; gradients are taken in, summed over
// ranks and spilled as backward gives them; with speculation chunks are updated in backward, the latest
// first.
//
// What it does not have: pauses of a disk, a rank that is slower than the others, activations (they are not
// part of the plan; forward_s and backward_s are given), guesses that are wrong.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/base/config.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"

namespace overspill::engine {

enum class Lane : uint8_t { compute, update, read, write, up, down, network };
inline constexpr size_t kLanes = 7;
const char* lane_name(Lane lane);

/// What a machine gives to one rank.
struct Rates {
  /// Bytes a second, of read to network; those of compute and update are not used.
  std::array<double, kLanes> bytes_per_s{};
  /// Reads and writes at the same time, together; 0: as much as the faster of both alone.
  double disk_bytes_per_s = 0;
  /// Share of the rank's processors that a lane takes while it works alone, 0 to 1. Where those of all busy
  /// lanes exceed 1 in sum, these lanes slow down alike.
  std::array<double, kLanes> processor{1, 1, 0, 0, 0, 0, 0};
  double update_s_per_element = 0;  // by all workers
  double intake_s_per_byte = 0;     // of a gradient, in backward and in step()
  double network_latency_s = 0;     // of a collective call
  double use_s = 0;                 // of a unit, by the caller: hooks and leases
};

/// What the caller computes for a unit in one micro-batch, in seconds of an otherwise idle machine.
struct UnitWork {
  double forward_s = 0;
  double backward_s = 0;
  bool in_backward = true;  // whether backward needs the weights: of a table that is looked up it does not
};

struct SimulatedStep {
  double step_s = 0;
  double waited_s = 0;  // of it: the caller, for anything but its own compute
  std::array<double, kLanes> busy_s{};
  std::array<double, kLanes> bytes{};  // through read to network
};

/// Simulates four steps and returns the fourth, since the first ones begin with an empty ring. Throws
/// std::invalid_argument where `work` is not of the layout's units, a number is negative or not finite, or
/// bytes have to pass a lane that has no speed.
SimulatedStep simulate(const Layout& layout, const Plan& plan, const Config& config,
                       const DeviceTraits& device, std::span<const UnitWork> work, const Rates& rates);

}  // namespace overspill::engine
