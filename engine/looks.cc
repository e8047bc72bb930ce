// What an engine says of itself: statistics, reports, predictions, what happened when (engine.h).
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/machine.h"
#include "engine/plan/predict.h"

namespace overspill::engine {

std::string Engine::stall() const {
  return machine_->stalls != nullptr && machine_->process.here() ? machine_->stalls->text() : std::string();
}

Stats Engine::stats() {
  Machine& m = machine_to_look_at();
  Stats stats;
  const MutexLock guard(m.context.mutex());
  stats.step = m.steps;
  stats.skipped_steps = m.skipped_steps;
  stats.host_budget_bytes = m.context.host_budget.limit_bytes();
  stats.host_used_bytes = m.context.host_budget.used_bytes();
  stats.host_peak_bytes = m.context.host_budget.peak_bytes();
  stats.updates = m.context.stats.updates;
  stats.wait_ns = m.context.stats.wait_ns;
  stats.guesses_taken = m.context.stats.guesses_taken;
  stats.guesses_dropped = m.context.stats.guesses_dropped;
  stats.guesses_unfinished = m.updater.guesses_unfinished();
  stats.trace_departures = m.context.trace.departures();
  stats.gather_free_run_bytes = m.gatherer.largest_free_run();
  if (m.context.resources.store != nullptr) stats.store = m.context.store().stats();
  return stats;
}

StepReport Engine::report() {
  Context& c = machine_to_look_at().context;
  const MutexLock guard(c.mutex());
  return c.meter.last();
}

StepReport Engine::report_inside() {
  Context& c = machine_to_look_at().context;
  const MutexLock guard(c.mutex());
  return c.meter.last_inside();
}

MachineFigures Engine::figures() {
  Context& c = machine_to_look_at().context;
  const MutexLock guard(c.mutex());
  return figures_of(c.meter.recent(), c.meter.forward_left(), c.plan, c.workers);
}

Prediction Engine::predict() {
  const Context& c = machine_->context;
  const MachineFigures f = figures();
  const double guessed = guessed_share(c.layout, c.plan, c.config.speculate);
  return engine::predict(c.plan, demands(c.layout, c.config, c.plan, f), f, guessed);
}

std::vector<BudgetRow> Engine::predict_budgets(std::span<const int64_t> budgets) {
  const Context& c = machine_->context;
  return engine::predict_budgets(c.layout, c.config, c.traits, figures(), budgets);
}

void Engine::record_journal(bool on) {
  const MutexLock guard(machine().context.mutex());
  machine().context.journal.enable(on);
  machine().context.device().time_events(on);
}

std::vector<JournalEntry> Engine::take_journal() {
  const MutexLock guard(machine().context.mutex());
  return machine().context.journal.take();
}

std::vector<DeviceSpan> Engine::take_device_spans() {
  std::vector<DeviceWork> work;
  {
    const MutexLock guard(machine().context.mutex());
    work = machine().context.journal.take_work();
  }
  return resolve(work);
}

}  // namespace overspill::engine
