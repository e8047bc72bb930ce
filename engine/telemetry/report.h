// What a step spent its time on. Every instant counts once, under the set of activities that went on in it.
// So the time that one activity was hidden under another is a sum over such sets, not an estimate.
//
// A report covers the time from the decision of the previous step() to that of its own. The updates in it are
// those of the previous step, which run during forward.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace overspill::engine {

/// What the caller is doing, as far as the engine can tell.
enum class Phase : uint8_t {
  outside,   // since step(); evaluation
  forward,   // since begin_pass of a training pass
  backward,  // since begin_backward, or else since the first gradient
};
inline constexpr size_t kPhases = 3;

/// Why a caller waited.
enum class Cause : uint8_t {
  updates,       // for updates of the unit it acquires, or whose gradient it adds
  last_updates,  // in step(), for updates of the previous step
  reads,         // for reads of gathered weights
  room,          // for room in the arena of gathered units
  staging,       // for a staging buffer of spilled gradients, or a sum that has to be read back
  activations,   // for an activation that is read back, or for room for one
  rest,          // for a read or write from outside the step: all components have to be at home
};
inline constexpr size_t kCauses = 7;

enum class Activity : uint8_t { call, wait, read, write, update };
inline constexpr size_t kActivities = 5;

struct StepReport {
  int64_t step = 0;      // steps taken at its end
  int64_t total_ns = 0;  // 0: there was no step yet

  // The caller's time: total = compute + call + wait.
  std::array<int64_t, kPhases> compute_ns{};  // outside the engine, by phase
  int64_t call_ns = 0;                        // in the engine, not waiting: taking gradients in, the norm
  int64_t wait_ns = 0;
  std::array<int64_t, kCauses> wait_by_cause_ns{};  // more than wait_ns in sum if several threads waited
  int64_t wait_for_disk_ns = 0;  // of wait_ns: transfers were under way and no update was running

  // What ran beside it. `hidden`: while no caller waited.
  std::array<int64_t, kPhases> update_worker_ns{};  // summed over workers
  int64_t update_ns = 0;                            // at least one ran
  int64_t update_hidden_ns = 0;
  int64_t updated_elements = 0;
  int64_t read_ns = 0;  // at least one transfer of the schedule was under way
  int64_t write_ns = 0;
  std::array<int64_t, kPhases> disk_ns{};  // of either kind
  int64_t disk_hidden_ns = 0;
  std::array<int64_t, kPhases>
      read_bytes{};  // as transfers ended; checkpoints and looks from outside not counted
  std::array<int64_t, kPhases> written_bytes{};

  int64_t compute_sum_ns() const { return compute_ns[0] + compute_ns[1] + compute_ns[2]; }
  int64_t update_worker_sum_ns() const {
    return update_worker_ns[0] + update_worker_ns[1] + update_worker_ns[2];
  }
  int64_t disk_sum_ns() const { return disk_ns[0] + disk_ns[1] + disk_ns[2]; }
  int64_t read_sum_bytes() const { return read_bytes[0] + read_bytes[1] + read_bytes[2]; }
  int64_t written_sum_bytes() const { return written_bytes[0] + written_bytes[1] + written_bytes[2]; }
};

/// Guarded by the owner's mutex; allocates nothing.
class StepMeter {
 public:
  using Clock = int64_t (*)();
  explicit StepMeter(Clock clock, size_t units = 0)
      : clock_(clock), then_ns_(clock()), reached_ns_(units, kNotReached), last_reached_ns_(reached_ns_) {}

  void begin(Activity activity);
  /// Throws std::logic_error where nothing of the kind had begun.
  void end(Activity activity);
  void enter(Phase phase);
  Phase phase() const { return phase_; }

  void moved(Activity read_or_write, int64_t bytes);
  void updated(int64_t elements) { now_.updated_elements += elements; }
  /// The caller acquires the unit: notes, once per step, how much of forward's compute was over.
  void reached(int32_t unit);
  void waited(Cause cause, int64_t ns) {
    now_.wait_by_cause_ns[static_cast<size_t>(cause)] += ns;
    if (phase_ == Phase::outside) waited_outside_ns_[static_cast<size_t>(cause)] += ns;
  }

  /// step() has decided: what was gathered since the last call becomes `last()`.
  void stepped(int64_t step);
  const StepReport& last() const { return last_; }
  /// The same without Phase::outside, so without saves, evaluations and time for which the process was
  /// stopped.
  const StepReport& last_inside() const { return last_inside_; }
  /// The sum of all reports so far, for counters that only grow; `step` is the last one's.
  const StepReport& sum() const { return sum_; }
  /// The latest reports, in no order, without the first two steps: nothing is traced in the first, and the
  /// updates during the second have no states to read.
  std::span<const StepReport> recent() const;
  /// By unit, of the last step: the share of the forward's compute that came after its first use, 0 to 1; 0
  /// where forward did not use it.
  std::vector<double> forward_left() const;

 private:
  static constexpr size_t kSets = size_t{1} << kActivities;
  static constexpr size_t kRemembered = 16;
  static constexpr int64_t kUnlikeOthers = 2;  // first steps
  static constexpr int64_t kNotReached = -1;
  void pass_time();
  void count(StepReport& report, size_t phase) const;

  Clock clock_;
  int64_t then_ns_;
  Phase phase_ = Phase::outside;
  std::array<int32_t, kActivities> going_on_{};
  size_t set_ = 0;                                             // bit i: activity i goes on
  std::array<std::array<int64_t, kSets>, kPhases> time_ns_{};  // by phase and set
  std::array<int64_t, kCauses> waited_outside_ns_{};           // of now_.wait_by_cause_ns
  StepReport now_;
  StepReport last_;
  StepReport last_inside_;
  StepReport sum_;
  std::array<StepReport, kRemembered> recent_{};
  int64_t reports_ = 0;
  std::vector<int64_t> reached_ns_;  // by unit: of the forward's compute
  std::vector<int64_t> last_reached_ns_;
};

}  // namespace overspill::engine
