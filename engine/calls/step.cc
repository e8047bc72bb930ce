// The optimizer step (docs/architecture.md): everything that has to be known before the first weight may
// change, and nothing else. The updates themselves run under the next forward (states/updater.cc).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/calls/machine.h"

namespace overspill::engine {

StepResult Machine::step(std::span<const optim::Hyper> groups, GroupRange range) {
  check_groups(groups, range);
  keeper.require_room_to_change();
  if (!range.all()) forget_guesses();  // which are of whole steps

  intake.finish();
  gradients.require_whole_sums(range);
  finish_updates();
  // Beyond this point every weight is that of the last step.

  if (!range.all()) settle_clip();  // it is of all gradients
  const Gradients::Only only(gradients, range);

  const GradientSummary gradient = reduce_gradients();
  // Beyond this point gradients are final: accumulated, reduced, the same sum of squares on every rank.

  const double norm =
      (setup.config.skip_nonfinite ? std::sqrt(gradient.squares) : norm_of(gradient)) * unscale;
  const double configured =
      setup.config.max_grad_norm > 0 && !caller_clipped ? clip_factor(norm, setup.config.max_grad_norm) : 1.0;
  const double clip = clipped.value_or(configured);
  const double kept = clipped.value_or(1.0);
  forget_clip();
  if (!gradient.finite && setup.config.skip_nonfinite) {
    std::string culprit = gradients.first_not_finite();
    leave_out();
    return {steps, norm, clip, true, std::move(culprit)};
  }

  capture_factors(groups, range, clip * unscale);
  // Beyond this point hyper-parameters and presence belong to this step; the caller may change its own.

  gradients.scale(kept);  // as the caller left them
  schedule_updates();
  // Beyond this point updates run, in forward order, but for those that were guessed right while backward
  // ran; whoever acquires a unit waits for its own.

  return {steps, norm, clip, false, {}};
}

StepResult Machine::skip_step(GroupRange range) {
  intake.finish();
  finish_updates();
  if (!range.all()) settle_clip();
  forget_clip();
  const Gradients::Only only(gradients, range);
  leave_out();
  return {steps, 0, 1, true, {}};
}

void Machine::leave_out() {
  gradients.clear();
  const MutexLock guard(core.mutex());
  ++skipped_steps;
  core.meter.stepped(steps);
  updater.skip();
}

void Machine::finish_updates() {
  const MutexLock lock(core.mutex());
  updater.finish();
}

GradientSummary Machine::reduce_gradients() {
  GradientSummary summary;
  intake.write_zeros();
  gradients.put_away();
  rounds.meet(Meeting::step, steps + skipped_steps, [&] {
    rounds.sum_gradients();
    gradients.reduce_presence();
    summary = gradients.summarize();
  });
  handed_over = true;
  return summary;
}

double Machine::norm_of(const GradientSummary& gradient) {
  if (gradient.finite || setup.layout.slices > 1 || !gradients.any_nan()) return std::sqrt(gradient.squares);
  return std::numeric_limits<double>::quiet_NaN();
}

double clip_factor(double norm, double limit) {
  const double factor = limit / (norm + 1e-6);
  return factor > 1.0 ? 1.0 : factor;  // NaN stays
}

void Machine::check_groups(std::span<const optim::Hyper> groups, GroupRange range) const {
  for (const Unit& unit : setup.layout.units) {
    if (!unit.trainable()) continue;
    for (const Segment& segment : unit.segments) {
      if (!range.has(segment.group)) continue;
      const int64_t number = segment.group - range.first;
      if (number >= std::ssize(groups)) {
        throw std::invalid_argument(fmt::format("{} belongs to group {}, step() was given {}", segment.name,
                                                segment.group, groups.size()));
      }
      const optim::Optimizer given = optim::optimizer_of(groups[number]);
      if (given != unit.optimizer) {
        throw std::invalid_argument(fmt::format("{} has the states of {}, group {} has the options of {}",
                                                segment.name, optim::name(unit.optimizer), segment.group,
                                                optim::name(given)));
      }
    }
  }
}

void Machine::capture_factors(std::span<const optim::Hyper> groups, GroupRange range, double scale) {
  const MutexLock guard(core.mutex());
  ++steps;
  for (size_t u = 0; u < model.units.size(); ++u) {
    const Unit& unit = setup.layout.units[u];
    UnitState& state = model.units[u];
    if (!unit.trainable()) continue;
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      state.updated[s] = gradients.present(static_cast<int32_t>(u), static_cast<int32_t>(s)) ? 1 : 0;
      if (state.updated[s] == 0) continue;
      ++state.steps[s];
      state.factors[s] =
          optim::make_factors(groups[unit.segments[s].group - range.first], state.steps[s],
                              scale * gradients.factor(static_cast<int32_t>(u), static_cast<int32_t>(s)));
    }
  }
}

void Machine::schedule_updates() {
  const MutexLock lock(core.mutex());
  const Rounds::Change change(rounds);
  core.meter.stepped(steps);
  scheduled_chunks_.clear();
  changed_units_.clear();
  for (int32_t u : gatherer.trace().forward_order()) {
    UnitState& state = model.units[u];
    if (std::find(state.updated.begin(), state.updated.end(), 1) == state.updated.end()) continue;
    ++state.generation;
    if (setup.lives_on_device(u)) device_units.update(u);
    if (!setup.lives_on_device(u) || setup.layout.slices > 1) changed_units_.push_back(u);
    if (setup.lives_on_device(u)) continue;
    const Unit& unit = setup.layout.units[u];
    for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      if (setup.layout.chunks[c].has_any(state.updated)) scheduled_chunks_.push_back(c);
    }
  }
  core.journal.note(Happening::stepped, -1);
  try {
    gatherer.invalidate(changed_units_);
  } catch (const kernels::DeviceError& error) {
    // The step is counted and some units are updated already: that is no refusal after which the engine goes
    // on.
    core.fail(
        fmt::format("step {}: the device may still read the weights before it: {}", steps, error.what()));
    core.check();
  }
  updater.schedule(scheduled_chunks_);
  gatherer.want_whole(changed_units_);
  gradients.handed_over();
}

}  // namespace overspill::engine
