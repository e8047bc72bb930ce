#include "engine/telemetry/report.h"

#include <algorithm>
#include <stdexcept>

namespace overspill::engine {
namespace {

constexpr size_t bit(Activity activity) {
  return size_t{1} << static_cast<size_t>(activity);
}

constexpr size_t kDisk = bit(Activity::read) | bit(Activity::write);
constexpr size_t kNotComputing = bit(Activity::wait) | bit(Activity::call);

/// Adds `one` to `sum`.
void add(StepReport& sum, const StepReport& one) {
  for (auto member :
       {&StepReport::total_ns, &StepReport::call_ns, &StepReport::wait_ns, &StepReport::wait_for_disk_ns,
        &StepReport::update_ns, &StepReport::update_hidden_ns, &StepReport::updated_elements,
        &StepReport::read_ns, &StepReport::write_ns, &StepReport::disk_hidden_ns})
    sum.*member += one.*member;
  for (auto member : {&StepReport::compute_ns, &StepReport::update_worker_ns, &StepReport::disk_ns,
                      &StepReport::read_bytes, &StepReport::written_bytes})
    for (size_t phase = 0; phase < kPhases; ++phase) (sum.*member)[phase] += (one.*member)[phase];
  for (size_t cause = 0; cause < kCauses; ++cause) sum.wait_by_cause_ns[cause] += one.wait_by_cause_ns[cause];
  sum.step = one.step;
}

}  // namespace

void StepMeter::pass_time() {
  const int64_t now = clock_();
  const int64_t passed = now - then_ns_;
  then_ns_ = now;
  const auto phase = static_cast<size_t>(phase_);
  time_ns_[phase][set_] += passed;
  now_.update_worker_ns[phase] += passed * going_on_[static_cast<size_t>(Activity::update)];
}

void StepMeter::begin(Activity activity) {
  pass_time();
  ++going_on_[static_cast<size_t>(activity)];
  set_ |= bit(activity);
}

void StepMeter::end(Activity activity) {
  pass_time();
  int32_t& count = going_on_[static_cast<size_t>(activity)];
  if (count == 0) throw std::logic_error("the step's report: an activity ended that had not begun");
  if (--count == 0) set_ &= ~bit(activity);
}

void StepMeter::enter(Phase phase) {
  pass_time();
  phase_ = phase;
}

void StepMeter::moved(Activity read_or_write, int64_t bytes) {
  auto& by_phase = read_or_write == Activity::read ? now_.read_bytes : now_.written_bytes;
  by_phase[static_cast<size_t>(phase_)] += bytes;
}

void StepMeter::reached(int32_t unit) {
  int64_t& then_ns = reached_ns_[static_cast<size_t>(unit)];
  if (phase_ != Phase::forward || then_ns != kNotReached) return;
  pass_time();
  then_ns = 0;
  for (size_t set = 0; set < kSets; ++set) {
    if ((set & kNotComputing) == 0) then_ns += time_ns_[static_cast<size_t>(Phase::forward)][set];
  }
}

std::span<const StepReport> StepMeter::recent() const {
  const auto count = static_cast<size_t>(std::max<int64_t>(0, reports_ - kUnlikeOthers));
  return std::span(recent_).first(std::min(count, kRemembered));
}

std::vector<double> StepMeter::forward_left() const {
  std::vector<double> left(last_reached_ns_.size());
  const int64_t all_ns = last_.compute_ns[static_cast<size_t>(Phase::forward)];
  for (size_t u = 0; u < left.size() && all_ns > 0; ++u) {
    const int64_t then_ns = last_reached_ns_[u];
    if (then_ns != kNotReached) left[u] = static_cast<double>(all_ns - then_ns) / static_cast<double>(all_ns);
  }
  return left;
}

/// Adds the times of a phase, each under all that went on in it.
void StepMeter::count(StepReport& r, size_t phase) const {
  for (size_t set = 0; set < kSets; ++set) {
    const int64_t ns = time_ns_[phase][set];
    const auto has = [set](size_t any) { return (set & any) != 0; };
    const bool waits = has(bit(Activity::wait));
    r.total_ns += ns;
    (waits ? r.wait_ns : has(bit(Activity::call)) ? r.call_ns : r.compute_ns[phase]) += ns;
    if (waits && has(kDisk) && !has(bit(Activity::update))) r.wait_for_disk_ns += ns;
    if (has(bit(Activity::update))) {
      r.update_ns += ns;
      if (!waits) r.update_hidden_ns += ns;
    }
    if (has(bit(Activity::read))) r.read_ns += ns;
    if (has(bit(Activity::write))) r.write_ns += ns;
    if (has(kDisk)) {
      r.disk_ns[phase] += ns;
      if (!waits) r.disk_hidden_ns += ns;
    }
  }
}

void StepMeter::stepped(int64_t step) {
  enter(Phase::outside);
  const auto outside = static_cast<size_t>(Phase::outside);
  now_.step = step;
  last_inside_ = now_;
  for (auto* by_phase :
       {&last_inside_.update_worker_ns, &last_inside_.read_bytes, &last_inside_.written_bytes})
    (*by_phase)[outside] = 0;
  for (size_t cause = 0; cause < kCauses; ++cause)
    last_inside_.wait_by_cause_ns[cause] -= waited_outside_ns_[cause];
  waited_outside_ns_ = {};
  for (size_t phase = 0; phase < kPhases; ++phase) {
    count(now_, phase);
    if (phase != outside) count(last_inside_, phase);
  }
  if (reports_ >= kUnlikeOthers) recent_[static_cast<size_t>(reports_ - kUnlikeOthers) % kRemembered] = now_;
  ++reports_;
  last_reached_ns_.swap(reached_ns_);
  std::fill(reached_ns_.begin(), reached_ns_.end(), kNotReached);
  last_ = now_;
  add(sum_, now_);
  now_ = {};
  time_ns_ = {};
}

}  // namespace overspill::engine
