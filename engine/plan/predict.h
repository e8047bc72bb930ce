// Predicts the time of a step under a plan from measurements of this machine. A pure function; it serves the
// plan's text, advice on budgets, and comparison with the measured step.
//
// The model (docs/step.md). Forward needs the updated weights, so the state traffic of a unit has to pass
// between step() and the unit's first use, but for what the ring (R bytes) reads ahead under backward and
// writes behind into it. What of forward comes after that use can only follow:
//
//   T_updated(k) = max((bytes of units up to k - 2 R) / bandwidth, elements up to k x seconds of an update)
//   T = call + max(T_backward, backward's bytes / bandwidth)
//            + max(T_forward, over units k in order of use: T_updated(k) + what is left of T_forward at k)
//
// The bandwidth is the measured one, corrected for the depth of the ring: each slot is read, updated and
// written in turn, and with few slots s the disk sometimes has nothing to read or to write. Two equal queues
// with s customers do s / (s + 1) of what they could (mean value analysis: Reiser and Lavenberg 1980,
// "Mean-value analysis of closed multichain queuing networks"). A drive whose reads and writes share one
// limit loses less with a shallow ring.
//
// Where the last unit's own compute is much of the step, it decides the time, since that compute hides no
// disk traffic. Without that term and without `call`, T is the lower bound; with only optimizer states on
// NVMe, forward's bytes are 20 N for N parameters. A share g of the chunks that is guessed (speculation)
// moves its traffic under backward as well: then no step is faster than max(T_forward + T_backward, all bytes
// / bandwidth), and the rest of the traffic, 1 - g, obeys the formula above. T_forward and T_backward are
// those of a run, so they have in them what updates take from compute.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/partition/layout.h"
#include "engine/plan/plan.h"
#include "engine/telemetry/report.h"

namespace overspill::engine {

/// Measurements of one step: the median of the latest steps.
struct MachineFigures {
  int64_t steps = 0;  // measured; 0: nothing is known
  double forward_s = 0;
  double backward_s = 0;
  double call_s = 0;
  double disk_bytes_per_s = 0;  // reads and writes together, while the schedule had any under way; 0: unknown
  int64_t ring_slots = 0;       // of the plan it was measured under
  double update_s_per_element = 0;   // all workers at it
  std::vector<double> forward_left;  // by unit: share of forward_s after its first use
  double step_s = 0;                 // duration of a step, without Phase::outside (telemetry/report.h)
};

/// From reports of single steps under `plan` and StepMeter::forward_left(); `workers`: of the updates.
MachineFigures figures_of(std::span<const StepReport> reports, std::vector<double> forward_left,
                          const Plan& plan, int64_t workers);

/// The work that must be done for a unit between step() and its first use in forward.
struct UnitDemand {
  int64_t bytes = 0;     // read and written
  int64_t elements = 0;  // updated
  double left_s = 0;     // of forward's compute, from that use on
};

/// In order of use; units that forward did not use come last.
std::vector<UnitDemand> demands(const Layout& layout, const Config& config, const Plan& plan,
                                const MachineFigures& figures);

enum class Limit : uint8_t { unknown, compute, disk };
const char* limit_name(Limit limit);

struct Prediction {
  double bound_s = 0;  // no schedule without speculation can be faster
  double step_s = 0;
  Limit limit = Limit::unknown;  // what takes most of step_s, and so has to become faster first
  double disk_s = 0;             // all traffic of a step
};

/// Limit::unknown, and zeros, where the figures do not suffice: no step was measured, or the plan needs the
/// disk and no byte was seen to move. `guessed_share`: the share of the chunks on NVMe that are guessed, 0 to
/// 1.
Prediction predict(const Plan& plan, std::span<const UnitDemand> demands, const MachineFigures& figures,
                   double guessed_share);

/// The share, 0 to 1, of the chunks with states on NVMe whose updates may be guessed under this plan.
double guessed_share(const Layout& layout, const Plan& plan, bool speculate);

struct BudgetRow {
  int64_t host_budget_bytes = 0;
  bool possible = false;  // false: too small
  Prediction prediction;
};

/// The same for other host budgets.
std::vector<BudgetRow> predict_budgets(const Layout& layout, const Config& config, const DeviceTraits& device,
                                       const MachineFigures& figures, std::span<const int64_t> budgets);

/// The budget among `rows` that saves most seconds per byte added to `now_bytes`; -1 where none saves a
/// fiftieth of `step_s`.
int64_t best_budget(std::span<const BudgetRow> rows, int64_t now_bytes, double step_s);

/// Two or three lines for people.
std::string prediction_text(const Plan& plan, const MachineFigures& figures, const Prediction& prediction,
                            std::span<const BudgetRow> rows);

}  // namespace overspill::engine
