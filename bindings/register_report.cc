#include <pybind11/stl.h>

#include <vector>

#include "bindings/bindings.h"
#include "engine/engine.h"
#include "engine/plan/predict.h"
#include "engine/telemetry/report.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using engine::Cause;
using engine::Phase;
using engine::StepReport;

double seconds(int64_t ns) {
  return static_cast<double>(ns) * 1e-9;
}

py::dict report_dict(const StepReport& r) {
  const auto of = [](const auto& values, auto which) { return values[static_cast<size_t>(which)]; };
  py::dict out;
  out["step"] = r.step;
  out["total_seconds"] = seconds(r.total_ns);
  out["compute_seconds"] = seconds(r.compute_sum_ns());
  out["forward_seconds"] = seconds(of(r.compute_ns, Phase::forward));
  out["backward_seconds"] = seconds(of(r.compute_ns, Phase::backward));
  out["outside_seconds"] = seconds(of(r.compute_ns, Phase::outside));
  out["call_seconds"] = seconds(r.call_ns);
  out["wait_seconds"] = seconds(r.wait_ns);
  py::dict waits;
  waits["updates"] = seconds(of(r.wait_by_cause_ns, Cause::updates));
  waits["last_updates"] = seconds(of(r.wait_by_cause_ns, Cause::last_updates));
  waits["reads"] = seconds(of(r.wait_by_cause_ns, Cause::reads));
  waits["room"] = seconds(of(r.wait_by_cause_ns, Cause::room));
  waits["staging"] = seconds(of(r.wait_by_cause_ns, Cause::staging));
  waits["activations"] = seconds(of(r.wait_by_cause_ns, Cause::activations));
  waits["rest"] = seconds(of(r.wait_by_cause_ns, Cause::rest));
  out["wait_by_cause"] = waits;
  out["wait_for_disk_seconds"] = seconds(r.wait_for_disk_ns);
  out["update_seconds"] = seconds(r.update_ns);
  out["update_worker_seconds"] = seconds(r.update_worker_sum_ns());
  out["update_hidden_seconds"] = seconds(r.update_hidden_ns);
  out["updated_elements"] = r.updated_elements;
  out["read_seconds"] = seconds(r.read_ns);
  out["write_seconds"] = seconds(r.write_ns);
  out["disk_seconds"] = seconds(r.disk_sum_ns());
  out["disk_hidden_seconds"] = seconds(r.disk_hidden_ns);
  out["read_bytes"] = r.read_sum_bytes();
  out["written_bytes"] = r.written_sum_bytes();
  out["backward_read_bytes"] = of(r.read_bytes, Phase::backward);
  out["backward_written_bytes"] = of(r.written_bytes, Phase::backward);
  return out;
}

py::dict prediction_dict(const engine::Prediction& p) {
  py::dict out;
  out["limit"] = engine::limit_name(p.limit);
  out["bound_seconds"] = p.bound_s;
  out["step_seconds"] = p.step_s;
  out["disk_seconds"] = p.disk_s;
  return out;
}

py::dict predict(engine::Engine& self, const std::vector<int64_t>& budgets) {
  engine::MachineFigures figures;
  engine::Prediction prediction;
  std::vector<engine::BudgetRow> rows;
  {
    const py::gil_scoped_release release;
    figures = self.figures();
    prediction = self.predict();
    rows = self.predict_budgets(budgets);
  }
  py::dict out = prediction_dict(prediction);
  py::dict measured;
  measured["steps"] = figures.steps;
  measured["forward_seconds"] = figures.forward_s;
  measured["backward_seconds"] = figures.backward_s;
  measured["call_seconds"] = figures.call_s;
  measured["update_seconds_per_param"] = figures.update_s_per_element;
  measured["disk_bytes_per_s"] = figures.disk_bytes_per_s;
  measured["step_seconds"] = figures.step_s;
  out["measured"] = measured;
  py::list others;
  for (const engine::BudgetRow& row : rows) {
    py::dict other = prediction_dict(row.prediction);
    other["host_budget_bytes"] = row.host_budget_bytes;
    other["possible"] = row.possible;
    others.append(other);
  }
  out["budgets"] = others;
  out["text"] = engine::prediction_text(self.plan(), figures, prediction, rows);
  return out;
}

}  // namespace

void add_predict(EngineClass& cls) {
  cls.def("predict", &predict, py::arg("budgets") = std::vector<int64_t>{});
}

void register_report(py::module_& m) {
  py::class_<StepReport>(m, "StepReport")
      .def_readonly("total_ns", &StepReport::total_ns)
      .def("as_dict", &report_dict);
}

}  // namespace overspill::bindings
