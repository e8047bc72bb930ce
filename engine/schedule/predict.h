// What a step will take under a plan, from what the machine was seen to do: a pure function, for the plan's
// text, for advice on budgets, and to be compared with what happened.
//
// The model (DESIGN 5). Forward needs the updated weights, so all state traffic has to pass between step()
// and the end of forward, but for what the ring (R bytes) reads ahead under backward and writes behind into
// it; weights on NVMe are read once more in backward:
//
//   T = call + max(T_backward, backward's reads / bandwidth) + max(T_forward, (forward's bytes - 2 R) /
//   bandwidth)
//
// With optimizer states alone on NVMe, forward's bytes are 20 N, and without `call` this is the bound. A
// share g of the chunks that is guessed (speculation) moves its traffic under backward as well: then no step
// is faster than max(T_forward + T_backward, all bytes / bandwidth), and the rest of the traffic, 1 - g,
// obeys the formula above. T_forward and T_backward are those of a run, so they have in them what updates
// take from compute.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/partition/layout.h"
#include "engine/schedule/plan.h"
#include "engine/schedule/report.h"

namespace overspill::engine {

/// Of one step, the mean of those measured.
struct MachineFigures {
  int64_t steps = 0;  // measured; 0: nothing is known
  double forward_s = 0;
  double backward_s = 0;
  double call_s = 0;
  double disk_bytes_per_s = 0;  // reads and writes together, while the schedule had any under way; 0: unknown
  double step_s = 0;            // what it took, without what the script did outside, and looks from outside
};

/// `sum`: of `steps` reports.
MachineFigures figures_of(const StepReport& sum, int64_t steps);

enum class Limit : uint8_t { unknown, compute, disk };
const char* limit_name(Limit limit);

struct Prediction {
  double bound_s = 0;  // no schedule without speculation can be faster
  double step_s = 0;
  Limit limit = Limit::unknown;  // of the longer phase: what has to become faster first
  double disk_s = 0;             // all traffic of a step
};

/// Limit::unknown, and zeros, where the figures do not suffice: no step was measured, or the plan needs the
/// disk and no byte was seen to move. `guessed_share`: of the chunks on NVMe, 0 to 1.
Prediction predict(const Plan& plan, const MachineFigures& figures, double guessed_share);

/// Of the chunks whose states are on NVMe: those that may be guessed under this plan.
double guessed_share(const Layout& layout, const Plan& plan, bool speculate);

struct BudgetRow {
  int64_t host_budget_bytes = 0;
  bool possible = false;  // false: too small
  Prediction prediction;
};

/// The same for other host budgets.
std::vector<BudgetRow> predict_budgets(const Layout& layout, const Config& config, const DeviceTraits& device,
                                       const MachineFigures& figures, std::span<const int64_t> budgets);

/// The budget among `rows` that saves most seconds for each byte more than `now_bytes`; -1 where none saves a
/// fiftieth.
int64_t best_budget(std::span<const BudgetRow> rows, int64_t now_bytes, double step_s);

/// Two or three lines for people.
std::string prediction_text(const Plan& plan, const MachineFigures& figures, const Prediction& prediction,
                            std::span<const BudgetRow> rows);

}  // namespace overspill::engine
