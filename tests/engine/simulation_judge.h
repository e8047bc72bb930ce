// What a simulated run must not do, and what its errors must say.
#pragma once

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>

#include "engine/engine.h"
#include "io/error.h"
#include "io/memory_store.h"
#include "tests/engine/simulation_setup.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {

class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string& what) {
  if (!holds) throw Violation(what);
}

/// What a lease has of the unit is what the reference would see, bit for bit, as everything here.
void check_weights(const engine::Engine& engine, const engine::Lease& lease, int unit,
                   const ToyReference& reference, int step);
/// Each gradient is there unless `absent`, and is the reference's.
void check_gradients(engine::Engine& engine, const ToyReference& reference, int step, int micro_batches,
                     const ToyReference::Absent& absent);
/// All weights and moments. `when`: for the message.
void check_contents(engine::Engine& engine, const ToyReference& reference, const char* when);

/// Faults that an engine may fail of.
int64_t serious(const io::FaultCounts& faults);

/// An error of the store names its place, and is of the kind that the setup's trouble makes.
void check_place_and_kind(const io::Error& error, const SimulationSetup& setup);
/// What a failed engine says names the place, and the last checkpoint; empty: there is none.
void check_told(const std::string& what, const std::filesystem::path& last_saved);
/// A failed engine does nothing any more. `folder`: where it is asked to save.
void check_refuses(engine::Engine& engine, const SimulationSetup& setup, const std::filesystem::path& folder);

}  // namespace overspill::testing
