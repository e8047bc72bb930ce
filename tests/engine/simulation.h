// One whole run of an engine over the store in memory, under virtual time and on one thread, drawn from a
// seed: model, placement, buffers, order of units, evaluation, saves, loads, and what the disk does to all of
// it. Nothing in it depends on the clock, on threads or on addresses: the seed is the run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "io/memory_store.h"

namespace overspill::testing {

struct SimulationOptions {
  uint64_t seed = 1;
  std::filesystem::path folder = {};  // for checkpoints; empty before and after
  bool journal = false;
  /// Puts a store of the test's own around the one in memory.
  std::function<std::unique_ptr<io::Store>(std::unique_ptr<io::MemoryStore>,
                                           std::shared_ptr<io::VirtualTime>)>
      wrap = {};
  bool quiet = false;  // no faults but delays and their like
};

struct SimulationResult {
  /// Empty when the property held: without an error every weight and moment is bit-equal to the scalar
  /// reference; an error is typed and names its place; nothing hangs; a failed engine refuses everything;
  /// what was saved opens whole or not at all.
  std::string violation;
  std::string setup;                      // what was drawn, for people
  std::string journal;                    // every event in order, if asked for
  std::map<std::string, int64_t> counts;  // of operations, faults and outcomes, by name
};

SimulationResult simulate(const SimulationOptions& options);

}  // namespace overspill::testing
