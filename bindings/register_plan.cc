// Plans and simulated steps, for machines that need not be there.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/engine_dicts.h"
#include "bindings/python_config.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"
#include "engine/plan/simulate.h"
#include "kernels/device_kernels.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using engine::Lane;
using engine::Plan;
using engine::UnitSpec;

engine::DeviceTraits traits_of(const PythonConfig& config, int ranks) {
  engine::DeviceTraits device{.shares_host_memory = config.device == "host"};
  if (device.shares_host_memory) return device;
  device.updates = kernels::all_formats();
  device.gathers = ranks > 1;
  return device;
}

Plan plan_for(const std::vector<UnitSpec>& units, const PythonConfig& config, int ranks) {
  return engine::make_plan(engine::make_layout(units, config.chunk_elements, 0, ranks, config.stage), config,
                           traits_of(config, ranks));
}

/// Numbers by the names of lanes; a name that is none is refused.
void set(std::array<double, engine::kLanes>& numbers, const py::dict& given) {
  for (const auto& [name, number] : given) {
    size_t lane = 0;
    while (lane < engine::kLanes && name.cast<std::string>() != engine::lane_name(static_cast<Lane>(lane)))
      ++lane;
    if (lane == engine::kLanes) throw std::invalid_argument("no lane is called " + name.cast<std::string>());
    numbers[lane] = number.cast<double>();
  }
}

engine::Rates rates_from(const py::dict& given) {
  engine::Rates rates;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "bytes_per_s") {
      set(rates.bytes_per_s, value.cast<py::dict>());
    } else if (name == "processor") {
      set(rates.processor, value.cast<py::dict>());
    } else if (name == "disk_bytes_per_s") {
      rates.disk_bytes_per_s = value.cast<double>();
    } else if (name == "update_s_per_element") {
      rates.update_s_per_element = value.cast<double>();
    } else if (name == "intake_s_per_byte") {
      rates.intake_s_per_byte = value.cast<double>();
    } else if (name == "network_latency_s") {
      rates.network_latency_s = value.cast<double>();
    } else if (name == "use_s") {
      rates.use_s = value.cast<double>();
    } else {
      throw std::invalid_argument("no rate is called " + name);
    }
  }
  return rates;
}

py::dict simulated(const std::vector<UnitSpec>& units, const PythonConfig& config,
                   const std::vector<std::tuple<double, double, bool>>& work, const py::dict& given,
                   int ranks) {
  const engine::Rates rates = rates_from(given);
  std::vector<engine::UnitWork> seconds;
  seconds.reserve(work.size());
  for (const auto& [forward, backward, needed] : work) seconds.push_back({forward, backward, needed});
  Plan plan;
  engine::SimulatedStep step;
  {
    const py::gil_scoped_release released;
    const engine::DeviceTraits device = traits_of(config, ranks);
    const engine::Layout layout = engine::make_layout(units, config.chunk_elements, 0, ranks, config.stage);
    plan = engine::make_plan(layout, config, device);
    step = engine::simulate(layout, plan, config, device, seconds, rates);
  }
  py::dict busy;
  py::dict bytes;
  for (size_t i = 0; i < engine::kLanes; ++i) {
    const char* const name = engine::lane_name(static_cast<Lane>(i));
    busy[name] = step.busy_s[i];
    if (static_cast<Lane>(i) > Lane::update) bytes[name] = step.bytes[i];
  }
  py::dict out;
  out["plan"] = std::move(plan);
  out["step_seconds"] = step.step_s;
  out["waited_seconds"] = step.waited_s;
  out["busy_seconds"] = busy;
  out["bytes"] = bytes;
  return out;
}

}  // namespace

void register_plan(py::module_& m) {
  py::class_<Plan>(m, "Plan").def_property_readonly("text", &Plan::text).def("as_dict", &plan_dict);
  m.def("plan", &plan_for, py::arg("units"), py::arg("config"), py::arg("ranks") = 1,
        "Where components of rank 0 would go; allocates nothing.");
  m.def("simulate", &simulated, py::arg("units"), py::arg("config"), py::arg("work"), py::arg("rates"),
        py::arg("ranks") = 1,
        "That plan, and a step under it, simulated (engine/plan/simulate.h). `work`: by unit, seconds of "
        "forward and "
        "of backward of one micro-batch, and whether backward needs its weights. `rates`: the fields of "
        "Rates by name; those of lanes are dicts.");
}

}  // namespace overspill::bindings
