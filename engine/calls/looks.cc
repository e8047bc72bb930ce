// What an engine says of itself: statistics, reports, predictions, what happened when (engine.h).
#include <string>
#include <utility>
#include <vector>

#include "engine/calls/machine.h"
#include "engine/engine.h"
#include "engine/plan/predict.h"

namespace overspill::engine {

std::string Engine::stall() const {
  return machine_->stalls != nullptr && machine_->process.here() ? machine_->stalls->text() : std::string();
}

Stats Engine::stats() {
  Machine& m = machine_to_look_at();
  Stats stats;
  const MutexLock guard(m.core.mutex());
  stats.step = m.steps;
  stats.skipped_steps = m.skipped_steps;
  stats.host_budget_bytes = m.hardware.host_budget.limit_bytes();
  stats.host_used_bytes = m.hardware.host_budget.used_bytes();
  stats.host_peak_bytes = m.hardware.host_budget.peak_bytes();
  stats.updates = m.core.stats.updates;
  stats.wait_ns = m.core.stats.wait_ns;
  stats.guesses_taken = m.core.stats.guesses_taken;
  stats.guesses_dropped = m.core.stats.guesses_dropped;
  stats.guesses_unfinished = m.updater.guesses_unfinished();
  stats.gathers = m.core.stats.gathers;
  stats.trace_departures = m.gatherer.trace().departures();
  stats.activations = m.activations.stats();
  stats.gather_free_run_bytes = m.gatherer.largest_free_run();
  if (m.core.store.exists()) stats.store = m.core.store->stats();
  return stats;
}

StepReport Engine::report() {
  Core& core = machine_to_look_at().core;
  const MutexLock guard(core.mutex());
  return core.meter.last();
}

StepReport Engine::report_inside() {
  Core& core = machine_to_look_at().core;
  const MutexLock guard(core.mutex());
  return core.meter.last_inside();
}

StepReport Engine::report_sum() {
  Core& core = machine_to_look_at().core;
  const MutexLock guard(core.mutex());
  return core.meter.sum();
}

MachineFigures Engine::figures() {
  Machine& m = machine_to_look_at();
  const MutexLock guard(m.core.mutex());
  return figures_of(m.core.meter.recent(), m.core.meter.forward_left(), m.setup.plan, m.hardware.workers);
}

Prediction Engine::predict() {
  const Setup& setup = machine_->setup;
  const MachineFigures f = figures();
  const double guessed = guessed_share(setup.layout, setup.plan, setup.config.speculate);
  return engine::predict(setup.plan, demands(setup.layout, setup.config, setup.plan, f), f, guessed);
}

std::vector<BudgetRow> Engine::predict_budgets(std::span<const int64_t> budgets) {
  const Setup& setup = machine_->setup;
  return engine::predict_budgets(setup.layout, setup.config, setup.traits, figures(), budgets);
}

void Engine::record_journal(bool on) {
  Machine& m = open_machine();
  // Events are timed as long as the journal may take one. The device may let us wait: not under the mutex.
  if (on) m.hardware.device().time_events(true);
  {
    const MutexLock guard(m.core.mutex());
    m.core.journal.enable(on);
    if (on) m.core.store.note_under_way();
  }
  if (!on) m.hardware.device().time_events(false);
}

std::vector<JournalEntry> Engine::take_journal() {
  const MutexLock guard(open_machine().core.mutex());
  return open_machine().core.journal.take();
}

std::vector<DeviceSpan> Engine::take_device_spans() {
  std::vector<DeviceWork> work;
  {
    const MutexLock guard(open_machine().core.mutex());
    work = open_machine().core.journal.take_work();
  }
  return resolve(work);
}

}  // namespace overspill::engine
