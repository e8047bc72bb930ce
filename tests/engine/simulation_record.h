// What a simulated run did: how often, and, if asked for, event by event.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "engine/engine.h"
#include "io/memory_store.h"
#include "tests/engine/simulation.h"

namespace overspill::testing {

class SimulationRecord {
 public:
  /// Fills the result's counts, and its journal if `journal`.
  SimulationRecord(SimulationResult& result, bool journal) : result_(result), journal_(journal) {}

  /// Whose events the journal has from here on, until `forget`.
  void follow(engine::Engine& engine, const io::MemoryStore& store);
  void forget() { engine_ = nullptr; }

  void count(const std::string& what, int64_t times = 1) { result_.counts[what] += times; }
  void count_faults(const io::FaultCounts& faults);
  /// A call of the engine is next.
  void call(const char* what);
  int64_t calls() const { return calls_; }

  /// A line of the journal, behind the events before it.
  void note(std::string_view what);
  void take_journals();

 private:
  SimulationResult& result_;
  const bool journal_;
  engine::Engine* engine_ = nullptr;
  const io::MemoryStore* store_ = nullptr;
  size_t answers_noted_ = 0;
  int64_t calls_ = 0;
};

}  // namespace overspill::testing
