#include "engine/schedule/report.h"

#include <stdexcept>

namespace overspill::engine {
namespace {

constexpr size_t bit(Activity activity) {
  return size_t{1} << static_cast<size_t>(activity);
}

}  // namespace

StepReport& operator+=(StepReport& sum, const StepReport& report) {
  const auto add = [](auto& to, const auto& from) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
  };
  sum.total_ns += report.total_ns;
  add(sum.compute_ns, report.compute_ns);
  sum.call_ns += report.call_ns;
  sum.wait_ns += report.wait_ns;
  add(sum.wait_by_cause_ns, report.wait_by_cause_ns);
  sum.wait_for_disk_ns += report.wait_for_disk_ns;
  add(sum.update_worker_ns, report.update_worker_ns);
  sum.update_ns += report.update_ns;
  sum.update_hidden_ns += report.update_hidden_ns;
  sum.updated_elements += report.updated_elements;
  sum.read_ns += report.read_ns;
  sum.write_ns += report.write_ns;
  sum.disk_ns += report.disk_ns;
  sum.disk_hidden_ns += report.disk_hidden_ns;
  add(sum.read_bytes, report.read_bytes);
  add(sum.written_bytes, report.written_bytes);
  return sum;
}

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

void StepMeter::stepped(int64_t step) {
  enter(Phase::outside);
  constexpr size_t kDisk = bit(Activity::read) | bit(Activity::write);
  StepReport& r = now_;
  r.step = step;
  for (size_t phase = 0; phase < kPhases; ++phase) {
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
        r.disk_ns += ns;
        if (!waits) r.disk_hidden_ns += ns;
      }
    }
  }
  if (last_.total_ns > 0) {
    sum_ += r;
    ++summed_steps_;
  }
  last_ = r;
  now_ = {};
  time_ns_ = {};
}

}  // namespace overspill::engine
