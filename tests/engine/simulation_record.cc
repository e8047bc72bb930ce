#include "tests/engine/simulation_record.h"

#include <fmt/format.h>

#include <utility>

#include "engine/telemetry/journal.h"

namespace overspill::testing {

void SimulationRecord::follow(engine::Engine& engine, const io::MemoryStore& store) {
  engine_ = &engine;
  store_ = &store;
  answers_noted_ = 0;
}

void SimulationRecord::count_faults(const io::FaultCounts& f) {
  const std::pair<const char*, int64_t> all[] = {{"delays", f.delayed},
                                                 {"reorderings", f.reordered},
                                                 {"short transfers", f.short_transfers},
                                                 {"EINTR or EAGAIN", f.interrupted},
                                                 {"errors that pass", f.passing_errors},
                                                 {"errno on read", f.read_errors},
                                                 {"errno on write", f.write_errors},
                                                 {"bit flips on read", f.bit_flips},
                                                 {"bit flips at rest", f.bit_flips_at_rest},
                                                 {"lost writes", f.lost_writes},
                                                 {"misdirected writes", f.misdirected_writes},
                                                 {"misdirected reads", f.misdirected_reads},
                                                 {"exports failed", f.export_errors},
                                                 {"unsynced writes dropped at a cut", f.dropped},
                                                 {"writes torn at a cut", f.torn}};
  for (const auto& [name, times] : all) count(fmt::format("faults: {}", name), times);
}

void SimulationRecord::call(const char* what) {
  ++calls_;
  count(fmt::format("operations: {}", what));
  note(what);
}

void SimulationRecord::note(std::string_view what) {
  if (!journal_) return;
  take_journals();
  result_.journal += fmt::format("{}\n", what);
}

void SimulationRecord::take_journals() {
  if (!journal_ || engine_ == nullptr) return;
  for (const engine::JournalEntry& e : engine_->take_journal()) {
    result_.journal += fmt::format("  {} unit {} chunk {} slot {}\n", engine::happening_name(e.happening),
                                   e.unit, e.chunk, e.slot);
  }
  const auto& answers = store_->answers();
  for (; answers_noted_ < answers.size(); ++answers_noted_) {
    const io::Answer& a = answers[answers_noted_];
    result_.journal += fmt::format("  {} us: {} at {}, {} bytes: {} {}\n", a.time_us,
                                   a.writes ? "write" : "read", a.offset, a.asked_bytes, a.result, a.fault);
  }
}

}  // namespace overspill::testing
