#include "engine/plan/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/plan/lanes.h"
#include "engine/plan/update_jobs.h"

namespace overspill::engine {
namespace {

constexpr int kSteps = 4;
constexpr int64_t kChunksMost = 20'000;  // of a finer division, neighbours of a unit are taken together
constexpr int64_t kUsesMost = 1'000'000;
constexpr double kLeastSpeed = 1;  // bytes a second
constexpr double kGreatest = 1e18;
// Urgencies of what passes the disks, the link and the network.
constexpr int64_t kDemand = 0;  // the caller waits for it
constexpr int64_t kAhead = 1;   // of a use to come, or a gradient
constexpr int64_t kDue = 2;     // the ring, for updates that forward waits for
constexpr int64_t kLater = 3;   // the ring reads ahead, or writes behind

enum class Access : uint8_t { in_place, gathered, once };  // once: a step, then in place (stages 1 and 2)
enum class Weights : uint8_t { absent, coming, there };

/// The steps of one rank.
class Schedule {
 public:
  Schedule(const Layout& layout, const Plan& plan, const Config& config, const DeviceTraits& device,
           std::span<const UnitWork> work, const Rates& rates);
  SimulatedStep run();

 private:
  struct UnitNow {
    Access access = Access::in_place;
    Weights weights = Weights::absent;
    bool moving = false;  // it is up to date and on its way
    int64_t pending = 0;  // jobs that it waits for
    double away = 0;      // bytes of its shard that have to be read
    std::vector<size_t> jobs;
    std::vector<size_t> uses;  // places in uses_, ascending
  };
  struct JobNow {
    bool in_slot = false;
    bool reading = false;  // into the slot
    bool there = false;    // states and weights are in the slot
    bool due = false;      // forward waits for its update
    bool given = false;    // the gradient came, and may be used before step()
    bool asked = false;    // the update
    bool guessed = false;  // it was updated before step()
  };
  struct Use {
    int32_t unit;
    bool backward;
    bool needs_weights;
    bool adds;  // its gradient, to that of an earlier micro-batch
    bool last;  // of the step's micro-batches
  };

  double bytes_of(int32_t unit) const { return static_cast<double>(layout_.units[unit].bytes()); }
  double gradient_bytes(int32_t unit) const;
  /// Of what all ranks have of a unit, the part that comes from others.
  double from_others() const { return 1 - 1 / static_cast<double>(layout_.slices); }
  size_t uses_until(int32_t unit) const;
  bool make_room(int32_t unit, size_t use);
  bool fill(int32_t unit, size_t use, int64_t urgency);
  void collect(int32_t unit, int64_t urgency);
  void fill_ahead();
  bool ready(const Use& use) const;
  void advance();
  void used(const Use& use);
  void give(const Use& use);
  void given(const Use& use);
  void try_step();
  void step();
  void fall_due(size_t job);
  void pump();
  void read(size_t job);
  void update(size_t job);
  void updated(size_t job);

  const Layout& layout_;
  const Plan& plan_;
  const Config& config_;
  const DeviceTraits& device_;
  const std::span<const UnitWork> work_;
  const Rates& rates_;
  Lanes lanes_;
  std::vector<Use> uses_;
  std::vector<UnitNow> units_;
  std::vector<UpdateJob> jobs_;
  std::vector<JobNow> now_;
  std::deque<size_t> due_;    // for the ring, in forward order; then
  std::deque<size_t> guess_;  // these, latest first; then
  std::deque<size_t> ahead_;  // these, in forward order
  int64_t free_slots_ = 0;
  double arena_ = 0;
  double arena_used_ = 0;
  size_t use_ = 0;
  bool computing_ = false;
  int64_t on_their_way_ = 0;  // gradients that step() waits for
  int steps_ = 0;
  double idle_since_ = 0;
  double waited_s_ = 0;
};

Schedule::Schedule(const Layout& layout, const Plan& plan, const Config& config, const DeviceTraits& device,
                   std::span<const UnitWork> work, const Rates& rates)
    : layout_(layout),
      plan_(plan),
      config_(config),
      device_(device),
      work_(work),
      rates_(rates),
      lanes_(rates),
      units_(layout.units.size()),
      arena_(static_cast<double>(device.shares_host_memory ? plan.gather_host_bytes
                                                           : plan.gather_device_bytes)) {
  const auto count = static_cast<int32_t>(layout.units.size());
  const int64_t micros = std::max<int64_t>(1, config.gradient_accumulation);
  const auto add = [&](int32_t unit, bool backward, int64_t micro) {
    const bool needs = !backward || work[static_cast<size_t>(unit)].in_backward;
    if (needs) units_[unit].uses.push_back(uses_.size());
    uses_.push_back({unit, backward, needs, micro > 0, micro + 1 == micros});
  };
  for (int64_t micro = 0; micro < micros; ++micro) {
    for (int32_t u = 0; u < count; ++u) add(u, false, micro);
    for (int32_t u = count - 1; u >= 0; --u) add(u, true, micro);
  }
  for (int32_t u = 0; u < count; ++u) {
    if (held_whole(layout, device, plan.weights_on_nvme[u])) {
      units_[u].access = Access::once;
    } else if (!used_in_place(layout, plan, device, u)) {
      units_[u].access = Access::gathered;
    }
  }
  const int64_t grain = 1 + std::ssize(layout.chunks) / kChunksMost;
  jobs_ = jobs_of(layout, plan, config, grain);
  now_.resize(jobs_.size());
  for (size_t j = 0; j < jobs_.size(); ++j) units_[jobs_[j].unit].jobs.push_back(j);
  free_slots_ = std::max(plan.ring_slots / grain, std::min<int64_t>(plan.ring_slots, 2));
}

SimulatedStep Schedule::run() {
  if (uses_.empty()) return {};
  SimulatedStep before;
  SimulatedStep at;
  for (const int end : {kSteps - 1, kSteps}) {
    before = at;
    if (steps_ == 0) {
      step();
      --steps_;  // it was the start
    }
    while (steps_ < end) {
      if (!lanes_.pass()) throw std::logic_error("the simulated schedule stands still");
    }
    at.step_s = lanes_.now();
    at.waited_s = waited_s_;
    for (size_t i = 0; i < kLanes; ++i) {
      at.busy_s[i] = lanes_.busy_s(static_cast<Lane>(i));
      at.bytes[i] = lanes_.bytes(static_cast<Lane>(i));
    }
  }
  at.step_s -= before.step_s;
  at.waited_s -= before.waited_s;
  for (size_t i = 0; i < kLanes; ++i) {
    at.busy_s[i] -= before.busy_s[i];
    at.bytes[i] -= before.bytes[i];
  }
  return at;
}

double Schedule::gradient_bytes(int32_t unit) const {
  const Unit& u = layout_.units[unit];
  return static_cast<double>(u.elements * gradient_element_bytes(u.format, config_.gradient_accumulation));
}

// ---- weights

/// From the present use to the unit's next one; 0: it is the present one.
size_t Schedule::uses_until(int32_t unit) const {
  const std::vector<size_t>& uses = units_[unit].uses;
  const auto found = std::lower_bound(uses.begin(), uses.end(), use_);
  return found != uses.end() ? *found - use_ : uses_.size() - use_ + uses.front();
}

/// For a use so many uses from now; units whose next use is farther than that make room, the farthest first.
bool Schedule::make_room(int32_t unit, size_t use) {
  while (arena_used_ > 0 && arena_used_ + bytes_of(unit) > arena_) {
    int32_t farthest = -1;
    size_t distance = use;
    for (int32_t u = 0; u < std::ssize(units_); ++u) {
      const bool idle = units_[u].access == Access::gathered && units_[u].weights == Weights::there;
      if (!idle || uses_until(u) <= distance) continue;
      distance = uses_until(u);
      farthest = u;
    }
    if (farthest < 0) return false;
    units_[farthest].weights = Weights::absent;
    arena_used_ -= bytes_of(farthest);
  }
  return true;
}

/// False: there is no room now.
bool Schedule::fill(int32_t unit, size_t use, int64_t urgency) {
  UnitNow& state = units_[unit];
  if (state.access == Access::in_place || state.weights != Weights::absent) return true;
  if (state.access == Access::gathered) {
    if (!make_room(unit, use)) return false;
    arena_used_ += bytes_of(unit);
  }
  state.weights = Weights::coming;
  state.away = 0;
  if (plan_.weights_on_nvme[unit]) {  // but for what pending updates bring, and what slots hold
    const Unit& u = layout_.units[unit];
    auto elements = static_cast<double>(u.shard_elements);
    for (size_t job : state.jobs) {
      if (now_[job].due || (now_[job].in_slot && !now_[job].reading)) elements -= jobs_[job].elements;
    }
    state.away = std::max(0.0, elements) * static_cast<double>(u.element_bytes);
  }
  collect(unit, urgency);
  return true;
}

/// Once the unit is up to date: from the disk, from the other ranks, to the device.
void Schedule::collect(int32_t unit, int64_t urgency) {
  UnitNow& state = units_[unit];
  if (state.weights != Weights::coming || state.pending > 0 || state.moving) return;
  state.moving = true;
  const double others = layout_.shards > 1 ? bytes_of(unit) * from_others() : 0;
  const bool lives_there = plan_.on_device[unit];
  const double up = device_.shares_host_memory || lives_there ? 0
                    : device_.gathers ? static_cast<double>(layout_.units[unit].shard_bytes())
                                      : bytes_of(unit);
  lanes_.move(Lane::read, state.away, urgency, [=, this] {
    lanes_.move(Lane::network, others, urgency, [=, this] {
      lanes_.move(Lane::up, up, urgency, [=, this] {
        units_[unit].weights = Weights::there;
        units_[unit].moving = false;
        advance();
      });
    });
  });
}

void Schedule::fill_ahead() {
  const auto ahead = static_cast<size_t>(config_.prefetch_units);
  const size_t end = ahead == 0 ? 0 : std::min(ahead + kUsesWithUpdates, uses_.size() - use_ - 1);
  for (size_t i = 1; i <= end; ++i) {
    const Use& use = uses_[use_ + i];
    const UnitNow& state = units_[use.unit];
    if (!use.needs_weights || state.access == Access::in_place || state.weights != Weights::absent) continue;
    const bool beside_update =
        state.pending > 0 && plan_.weights_on_nvme[use.unit] && device_.shares_host_memory;
    if (i > ahead && !beside_update) return;
    if (!fill(use.unit, i, kAhead)) return;
  }
}

// ---- the caller

bool Schedule::ready(const Use& use) const {
  const UnitNow& state = units_[use.unit];
  if (!use.needs_weights) return true;
  return state.pending == 0 && (state.access == Access::in_place || state.weights == Weights::there);
}

void Schedule::advance() {
  if (computing_ || use_ >= uses_.size()) return;
  const Use use = uses_[use_];
  if (use.needs_weights) fill(use.unit, 0, kDemand);
  fill_ahead();
  if (computing_ || !ready(use)) return;
  computing_ = true;
  waited_s_ += lanes_.now() - idle_since_;
  const UnitWork& work = work_[use.unit];
  double seconds = rates_.use_s + (use.backward ? work.backward_s : work.forward_s);
  if (use.backward && device_.shares_host_memory)
    seconds += gradient_bytes(use.unit) * rates_.intake_s_per_byte;
  lanes_.ask(Lane::compute, seconds, 0, [this, use] { used(use); });
}

void Schedule::used(const Use& use) {
  computing_ = false;
  idle_since_ = lanes_.now();
  ++use_;
  if (use.backward && layout_.units[use.unit].trainable()) give(use);
  advance();
  try_step();
}

/// A gradient: to the host, over the ranks, to the disk. Where the ranks sum on their devices, only this
/// rank's part goes to the host.
void Schedule::give(const Use& use) {
  const double bytes = gradient_bytes(use.unit);
  const bool stays = plan_.on_device[use.unit] || (plan_.summed_on_device[use.unit] && !use.last);
  const double down = device_.shares_host_memory || stays ? 0 : bytes;
  const bool sums = layout_.slices > 1 && (plan_.gradients_pooled || use.last);
  const bool there = plan_.sums_device_bytes > 0;
  double spilled = 0;
  for (size_t job : units_[use.unit].jobs) spilled += jobs_[job].gradient;
  ++on_their_way_;
  lanes_.move(Lane::down, there ? 0 : down, kAhead, [=, this] {
    lanes_.move(Lane::network, sums ? bytes * from_others() : 0, kAhead, [=, this] {
      lanes_.move(Lane::down, there ? down / static_cast<double>(layout_.slices) : 0, kAhead, [=, this] {
        lanes_.move(Lane::read, use.adds ? spilled : 0, kAhead,
                    [=, this] { lanes_.move(Lane::write, spilled, kAhead, [=, this] { given(use); }); });
      });
    });
  });
}

void Schedule::given(const Use& use) {
  --on_their_way_;
  for (size_t job : units_[use.unit].jobs) {
    if (!use.last || !jobs_[job].may_guess) continue;
    now_[job].given = true;
    if (!jobs_[job].in_ring || now_[job].there) update(job);
  }
  try_step();
}

/// All gradients are final.
void Schedule::try_step() {
  if (use_ == uses_.size() && !computing_ && on_their_way_ == 0) step();
}

void Schedule::step() {
  waited_s_ += lanes_.now() - idle_since_;
  idle_since_ = lanes_.now();
  ++steps_;
  use_ = 0;
  arena_used_ = 0;
  due_.clear();
  guess_.clear();
  ahead_.clear();
  for (int32_t u = 0; u < std::ssize(units_); ++u) {
    UnitNow& state = units_[u];
    if (layout_.units[u].trainable()) state.weights = Weights::absent;  // others do not change
    if (state.access == Access::gathered && state.weights == Weights::there) arena_used_ += bytes_of(u);
  }
  for (size_t j = 0; j < jobs_.size(); ++j) {
    if (!std::exchange(now_[j].guessed, false)) fall_due(j);
    if (jobs_[j].in_ring && !jobs_[j].may_guess) ahead_.push_back(j);
    if (jobs_[j].in_ring && jobs_[j].may_guess) guess_.push_front(j);
  }
  for (int32_t u = 0; u < std::ssize(units_); ++u) {
    if (units_[u].access == Access::once) fill(u, 0, kAhead);
  }
  pump();
  advance();
}

// ---- updates

void Schedule::fall_due(size_t job) {
  JobNow& now = now_[job];
  now.due = true;
  ++units_[jobs_[job].unit].pending;
  if (!jobs_[job].in_ring || now.there) return update(job);
  if (!now.in_slot) due_.push_back(job);
}

/// Starts reads for the ring as far as it has slots.
void Schedule::pump() {
  while (free_slots_ > 0) {
    std::deque<size_t>& list = !due_.empty() ? due_ : !guess_.empty() ? guess_ : ahead_;
    // What is read ahead of its gradient may still be on its way from the last step.
    if (list.empty() || now_[list.front()].in_slot || (&list != &due_ && now_[list.front()].due)) return;
    const size_t job = list.front();
    list.pop_front();
    --free_slots_;
    now_[job].in_slot = true;
    read(job);
  }
}

void Schedule::read(size_t job) {
  now_[job].reading = true;
  lanes_.move(Lane::read, jobs_[job].read, now_[job].due ? kDue : kLater, [=, this] {
    now_[job].reading = false;
    now_[job].there = true;
    if (now_[job].due || now_[job].given) update(job);
  });
}

/// The latest guess is the most urgent one, since backward gives the gradients in that order.
void Schedule::update(size_t job) {
  JobNow& now = now_[job];
  if (std::exchange(now.asked, true)) return;
  const auto place = static_cast<int64_t>(job);
  const int64_t urgency = now.due ? place : 2 * std::ssize(jobs_) - place;
  lanes_.move(Lane::read, jobs_[job].gradient, kDue, [=, this] {
    lanes_.ask(Lane::update, jobs_[job].elements * rates_.update_s_per_element, urgency,
               [=, this] { updated(job); });
  });
}

void Schedule::updated(size_t job) {
  JobNow& now = now_[job];
  const int32_t unit = jobs_[job].unit;
  const bool due = std::exchange(now.due, false);  // before anything that follows may let it fall due again
  now.asked = now.given = now.there = false;
  now.guessed = !due;
  if (jobs_[job].in_ring) {
    lanes_.move(Lane::write, jobs_[job].written, kLater, [=, this] {
      now_[job].in_slot = false;
      ++free_slots_;
      // The next step came while it was still being written.
      if (now_[job].due) due_.insert(std::upper_bound(due_.begin(), due_.end(), job), job);
      pump();
    });
  }
  if (!due) return;
  if (--units_[unit].pending > 0) return;
  collect(unit, kAhead);
  advance();
}

void check(const Layout& layout, const Config& config, std::span<const UnitWork> work, const Rates& rates) {
  if (work.size() != layout.units.size())
    throw std::invalid_argument(
        fmt::format("work of {} units was given, and the model has {}", work.size(), layout.units.size()));
  if (std::ssize(work) * 2 > kUsesMost / std::max<int64_t>(1, config.gradient_accumulation))
    throw std::invalid_argument(fmt::format(
        "a step of {} micro-batches over {} units is too long to simulate: give fewer micro-batches",
        config.gradient_accumulation, work.size()));
  const auto sound = [](double number) { return number >= 0 && number <= kGreatest; };
  bool all = sound(rates.disk_bytes_per_s) && sound(rates.update_s_per_element) &&
             sound(rates.intake_s_per_byte) && sound(rates.network_latency_s) && sound(rates.use_s);
  for (const double speed : rates.bytes_per_s)
    all = all && sound(speed) && (speed == 0 || speed >= kLeastSpeed);
  for (const double share : rates.processor) all = all && share >= 0 && share <= 1;
  for (const UnitWork& unit : work) all = all && sound(unit.forward_s) && sound(unit.backward_s);
  if (!all)
    throw std::invalid_argument(
        "rates and seconds have to be finite and not negative, speeds at least a byte a second, and shares "
        "of "
        "processors at most 1");
}

}  // namespace

SimulatedStep simulate(const Layout& layout, const Plan& plan, const Config& config,
                       const DeviceTraits& device, std::span<const UnitWork> work, const Rates& rates) {
  check(layout, config, work, rates);
  return Schedule(layout, plan, config, device, work, rates).run();
}

}  // namespace overspill::engine
