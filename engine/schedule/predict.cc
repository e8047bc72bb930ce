#include "engine/schedule/predict.h"

#include <fmt/format.h>

#include <algorithm>

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

int64_t sum(const std::array<int64_t, kPhases>& by_phase) {
  return by_phase[0] + by_phase[1] + by_phase[2];
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

MachineFigures figures_of(const StepReport& total, int64_t steps) {
  MachineFigures f;
  if (steps == 0) return f;
  const auto of = [&](int64_t ns) { return seconds(ns) / static_cast<double>(steps); };
  f.steps = steps;
  f.forward_s = of(total.compute_ns[static_cast<size_t>(Phase::forward)]);
  f.backward_s = of(total.compute_ns[static_cast<size_t>(Phase::backward)]);
  f.call_s = of(total.call_ns);
  const int64_t apart_ns = total.compute_ns[static_cast<size_t>(Phase::outside)] +
                           total.wait_by_cause_ns[static_cast<size_t>(Cause::rest)];
  f.step_s = of(total.total_ns - apart_ns);
  const int64_t moved = sum(total.read_bytes) + sum(total.written_bytes);
  if (total.disk_ns > 0) f.disk_bytes_per_s = static_cast<double>(moved) / seconds(total.disk_ns);
  return f;
}

Prediction predict(const Plan& plan, const MachineFigures& f, double guessed) {
  const int64_t bytes = plan.nvme_read_bytes_per_step + plan.nvme_written_bytes_per_step;
  if (f.steps == 0 || (bytes > 0 && f.disk_bytes_per_s <= 0)) return {};
  const auto disk_s = [&](double moved) {
    return bytes > 0 ? std::max(0.0, moved) / f.disk_bytes_per_s : 0.0;
  };
  const auto backward_bytes = static_cast<double>(plan.weights_nvme_bytes + plan.gradients_nvme_bytes);
  const auto forward_bytes = static_cast<double>(bytes) - backward_bytes;
  const auto ahead = static_cast<double>(2 * plan.ring_slots * plan.ring_slot_bytes);

  const double forward_disk_s = disk_s(forward_bytes - ahead);
  const double backward_disk_s = disk_s(backward_bytes);
  Prediction p;
  p.disk_s = disk_s(static_cast<double>(bytes));
  p.bound_s = std::max(f.backward_s, backward_disk_s) + std::max(f.forward_s, forward_disk_s);
  const double late_s = std::max(f.backward_s, backward_disk_s) +
                        std::max(f.forward_s, disk_s((1 - guessed) * forward_bytes - ahead));
  p.step_s = f.call_s + (guessed > 0 ? std::max(late_s, p.disk_s) : p.bound_s);
  const bool disk = guessed > 0 ? p.disk_s > f.forward_s + f.backward_s : forward_disk_s > f.forward_s;
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
      row.prediction = predict(plan, figures, guessed_share(layout, plan, config.speculate));
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
