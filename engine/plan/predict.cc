#include "engine/plan/predict.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/memory/budget.h"

namespace overspill::engine {
namespace {

constexpr double kWorthIt = 0.02;  // of a step, that a budget has to save

double seconds(int64_t ns) {
  return static_cast<double>(ns) * 1e-9;
}

double gib(int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(int64_t{1} << 30);
}

/// What passes while the caller is in forward or backward; outside it may be stopped, or wait for its data.
int64_t in_step(const std::array<int64_t, kPhases>& by_phase) {
  return by_phase[static_cast<size_t>(Phase::forward)] + by_phase[static_cast<size_t>(Phase::backward)];
}

/// Of those that are not negative; 0 where there is none.
template <class Value>
double median(std::span<const StepReport> reports, Value value) {
  std::vector<double> values;
  for (const StepReport& report : reports) {
    if (const double v = value(report); v >= 0) values.push_back(v);
  }
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

/// Of what a disk could move, what so many slots of the ring make it move.
double overlap(int64_t slots) {
  return slots > 0 ? static_cast<double>(slots) / static_cast<double>(slots + 1) : 1;
}

/// When forward ends after step(), and for how long of that the disk is what it waits for.
struct ForwardEnd {
  double s = 0;
  double disk_s = 0;
};

ForwardEnd forward_end(std::span<const UnitDemand> demands, const MachineFigures& f, double bytes_per_s,
                       double share, double ahead) {
  ForwardEnd end{.s = f.forward_s};
  double bytes = -ahead;
  double updated_s = 0;
  for (const UnitDemand& demand : demands) {
    bytes += share * static_cast<double>(demand.bytes);
    updated_s += share * static_cast<double>(demand.elements) * f.update_s_per_element;
    if (updated_s + demand.left_s > end.s) end = {.s = updated_s + demand.left_s};
    if (bytes <= 0) continue;
    const double there_s = bytes / bytes_per_s;
    if (there_s + demand.left_s > end.s) end = {.s = there_s + demand.left_s, .disk_s = there_s};
  }
  return end;
}

}  // namespace

const char* limit_name(Limit limit) {
  switch (limit) {
    case Limit::unknown:
      return "unknown";
    case Limit::compute:
      return "compute";
    case Limit::disk:
      return "disk";
  }
  return "?";
}

MachineFigures figures_of(std::span<const StepReport> reports, std::vector<double> forward_left,
                          const Plan& plan, int64_t workers) {
  MachineFigures f;
  f.ring_slots = plan.ring_slots;
  f.steps = static_cast<int64_t>(reports.size());
  f.forward_left = std::move(forward_left);
  const auto compute_s = [&](Phase phase) {
    return median(reports,
                  [&](const StepReport& r) { return seconds(r.compute_ns[static_cast<size_t>(phase)]); });
  };
  f.forward_s = compute_s(Phase::forward);
  f.backward_s = compute_s(Phase::backward);
  f.call_s = median(reports, [](const StepReport& r) { return seconds(r.call_ns); });
  f.step_s = median(reports, [](const StepReport& r) {
    return seconds(r.total_ns - r.compute_ns[static_cast<size_t>(Phase::outside)] -
                   r.wait_by_cause_ns[static_cast<size_t>(Cause::rest)]);
  });
  f.disk_bytes_per_s = median(reports, [](const StepReport& r) {
    const int64_t ns = in_step(r.disk_ns);
    return ns > 0 ? static_cast<double>(in_step(r.read_bytes) + in_step(r.written_bytes)) / seconds(ns) : -1;
  });
  f.update_s_per_element = median(reports, [&](const StepReport& r) {
    const auto elements = static_cast<double>(r.updated_elements * std::max<int64_t>(1, workers));
    return elements > 0 ? seconds(r.update_worker_sum_ns()) / elements : -1;
  });
  return f;
}

std::vector<UnitDemand> demands(const Layout& layout, const Config& config, const Plan& plan,
                                const MachineFigures& f) {
  std::vector<UnitDemand> found(layout.units.size());
  for (size_t u = 0; u < layout.units.size(); ++u) {
    const Unit& unit = layout.units[u];
    if (u < f.forward_left.size()) found[u].left_s = f.forward_left[u] * f.forward_s;
    if (plan.weights_on_nvme[u]) found[u].bytes = (unit.trainable() ? 2 : 1) * unit.shard_bytes();
  }
  for (size_t c = 0; c < layout.chunks.size(); ++c) {
    const Chunk& chunk = layout.chunks[c];
    const Unit& unit = layout.units[chunk.unit];
    if (!unit.trainable() || plan.on_device[chunk.unit]) continue;
    UnitDemand& demand = found[chunk.unit];
    demand.elements += chunk.elements;
    if (plan.states_on_nvme[c]) demand.bytes += 2 * unit.state_bytes(chunk.elements);
    if (plan.gradients_on_nvme[c])
      demand.bytes += chunk.elements * gradient_element_bytes(unit.format, config.gradient_accumulation);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const UnitDemand& a, const UnitDemand& b) { return a.left_s > b.left_s; });
  return found;
}

Prediction predict(const Plan& plan, std::span<const UnitDemand> demands, const MachineFigures& f,
                   double guessed) {
  const auto bytes = static_cast<double>(plan.nvme_read_bytes_per_step + plan.nvme_written_bytes_per_step);
  if (f.steps == 0 || (bytes > 0 && f.disk_bytes_per_s <= 0)) return {};
  const double bytes_per_s = f.disk_bytes_per_s * overlap(plan.ring_slots) / overlap(f.ring_slots);
  const auto disk_s = [&](double moved) { return moved > 0 ? moved / bytes_per_s : 0.0; };
  double forward_bytes = 0;
  for (const UnitDemand& demand : demands) forward_bytes += static_cast<double>(demand.bytes);
  const auto ahead = static_cast<double>(2 * plan.ring_slots * plan.ring_slot_bytes);

  const double backward_disk_s = disk_s(bytes - forward_bytes);
  const double backward_s = std::max(f.backward_s, backward_disk_s);
  const ForwardEnd forward = forward_end(demands, f, bytes_per_s, 1 - guessed, ahead);
  Prediction p;
  p.disk_s = disk_s(bytes);
  p.bound_s = backward_s + std::max(f.forward_s, disk_s(forward_bytes - ahead));
  p.step_s = f.call_s + backward_s + forward.s;
  const double waits_s = forward.disk_s + (backward_disk_s > f.backward_s ? backward_disk_s : 0);
  bool disk = waits_s > (backward_s + forward.s) / 2;
  if (guessed > 0) {
    p.step_s = f.call_s + std::max(backward_s + forward.s, p.disk_s);
    disk = p.disk_s > f.forward_s + f.backward_s;
  }
  p.limit = disk ? Limit::disk : Limit::compute;
  return p;
}

double guessed_share(const Layout& layout, const Plan& plan, bool speculate) {
  if (!speculate || layout.slices > 1) return 0;
  int64_t elements = 0;
  int64_t guessed = 0;
  int64_t room = plan.second_weights;
  for (size_t c = 0; c < layout.chunks.size(); ++c) {
    if (!plan.states_on_nvme[c]) continue;
    const Chunk& chunk = layout.chunks[c];
    elements += chunk.elements;
    // Where hi is on NVMe too, the guess needs no second one.
    if (!may_guess(plan, static_cast<int32_t>(c))) continue;
    if (plan.weights_on_nvme[chunk.unit] || room-- > 0) guessed += chunk.elements;
  }
  return elements > 0 ? static_cast<double>(guessed) / static_cast<double>(elements) : 0;
}

std::vector<BudgetRow> predict_budgets(const Layout& layout, const Config& config, const DeviceTraits& device,
                                       const MachineFigures& figures, std::span<const int64_t> budgets) {
  std::vector<BudgetRow> rows;
  for (int64_t budget : budgets) {
    BudgetRow row;
    row.host_budget_bytes = budget;
    Config other = config;
    other.host_budget_bytes = budget;
    try {
      const Plan plan = make_plan(layout, other, device);
      row.prediction = predict(plan, demands(layout, config, plan, figures), figures,
                               guessed_share(layout, plan, config.speculate));
      row.possible = true;
    } catch (const BudgetError&) {
      row.possible = false;
    }
    rows.push_back(row);
  }
  return rows;
}

int64_t best_budget(std::span<const BudgetRow> rows, int64_t now_bytes, double step_s) {
  int64_t best = -1;
  double most = 0;
  for (const BudgetRow& row : rows) {
    if (!row.possible || row.prediction.limit == Limit::unknown || row.host_budget_bytes <= now_bytes)
      continue;
    const double saved_s = step_s - row.prediction.step_s;
    if (saved_s < kWorthIt * step_s) continue;
    const double rate = saved_s / static_cast<double>(row.host_budget_bytes - now_bytes);
    if (rate <= most) continue;
    most = rate;
    best = row.host_budget_bytes;
  }
  return best;
}

std::string prediction_text(const Plan& plan, const MachineFigures& f, const Prediction& p,
                            std::span<const BudgetRow> rows) {
  if (p.limit == Limit::unknown) return "  prediction: too little was measured yet\n";
  std::string out = fmt::format(
      "  a step: predicted {:.2f} s, bound {:.2f} s (forward {:.2f}, backward {:.2f}, disk {:.2f} at {:.2f} "
      "GB/s), "
      "measured {:.2f} s; the {} decides\n",
      p.step_s, p.bound_s, f.forward_s, f.backward_s, p.disk_s, f.disk_bytes_per_s * 1e-9, f.step_s,
      limit_name(p.limit));
  const int64_t best = best_budget(rows, plan.host_budget_bytes, p.step_s);
  if (best < 0) return out + "  no larger host budget would save a fiftieth of it\n";
  const auto row =
      std::find_if(rows.begin(), rows.end(), [&](const BudgetRow& r) { return r.host_budget_bytes == best; });
  return out +
         fmt::format(
             "  a host budget of {:.2f} GiB in place of {:.2f} would help most for its size: {:.2f} s\n",
             gib(best), gib(plan.host_budget_bytes), row->prediction.step_s);
}

}  // namespace overspill::engine
