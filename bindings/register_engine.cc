#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <chrono>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/engine_dicts.h"
#include "bindings/group_communicator.h"
#include "bindings/python_config.h"
#include "cpu_optim/optimizer.h"
#include "engine/collectives/nccl.h"
#include "engine/collectives/nccl_library.h"
#include "engine/engine.h"
#include "engine/resources.h"
#include "engine/telemetry/chrome_trace.h"
#include "kernels/cuda/cuda_device.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using engine::Config;
using engine::Engine;
using engine::Placement;
using engine::Plan;
using engine::SegmentSpec;
using engine::UnitSpec;

using Holder = std::unique_ptr<Engine, EngineDeleter>;

Placement placement_from(const std::string& name) {
  if (name == "auto") return Placement::automatic;
  if (name == "host") return Placement::host;
  if (name == "half") return Placement::half;
  if (name == "nvme") return Placement::nvme;
  if (name == "device") return Placement::device;
  throw std::invalid_argument("unknown placement '" + name + "': one of auto, host, half, nvme, device");
}

std::string placement_name(Placement placement) {
  switch (placement) {
    case Placement::automatic:
      return "auto";
    case Placement::host:
      return "host";
    case Placement::half:
      return "half";
    case Placement::nvme:
      return "nvme";
    case Placement::device:
      return "device";
  }
  return "?";
}

/// The first group of a range, and the one behind its last; None: all.
using GivenRange = std::optional<std::pair<int64_t, int64_t>>;

engine::GroupRange range_of(const GivenRange& given) {
  return given ? engine::GroupRange{given->first, given->second} : engine::GroupRange{};
}

/// A method of a range as Python calls it.
template <class Result>
auto about(Result (Engine::*method)(engine::GroupRange)) {
  return [method](Engine& self, const GivenRange& groups) { return (self.*method)(range_of(groups)); };
}

/// Groups as OverspillOptimizer gives them: "optimizer" beside its fields.
std::vector<optim::Hyper> hypers(const std::vector<py::dict>& groups) {
  std::vector<optim::Hyper> all;
  for (const py::dict& group : groups)
    all.push_back(hyper_from(group["optimizer"].cast<std::string>(), group));
  return all;
}

/// The std::shared_ptr<kernels::Device> of a capsule "overspill.device"; null of None.
std::shared_ptr<kernels::Device> device_of(const py::object& capsule) {
  if (capsule.is_none()) return nullptr;
  auto* const device = PyCapsule_GetPointer(capsule.ptr(), "overspill.device");
  if (device == nullptr) throw py::error_already_set();
  return *static_cast<std::shared_ptr<kernels::Device>*>(device);
}

std::string why_no_nccl(const std::string& library) {
  try {
    (void)engine::nccl::load(library);
    return {};
  } catch (const engine::CommunicatorError& error) {
    return error.what();
  }
}

template <class T>
std::span<T> floats_at(uintptr_t address, int64_t bytes) {
  if (bytes < 0 || bytes % 4 != 0 || address % 4 != 0)
    throw std::invalid_argument("states and whole gradients are passed as fp32");
  return {reinterpret_cast<T*>(address), static_cast<size_t>(bytes / 4)};
}

/// Of a call about a segment's gradient in fp32.
template <class T>
auto about_whole(bool (Engine::*call)(int32_t, int32_t, std::span<T>)) {
  return [call](Engine& self, int32_t unit, int32_t segment, uintptr_t address, int64_t bytes) {
    return (self.*call)(unit, segment, floats_at<T>(address, bytes));
  };
}

void register_specs(py::module_& m) {
  py::class_<SegmentSpec>(m, "Segment")
      .def(py::init([](std::string name, std::vector<int64_t> shape, int64_t group,
                       std::vector<std::string> aliases, std::vector<int64_t> strides, bool in_norm,
                       int64_t parameters) {
             return SegmentSpec{std::move(name),    std::move(shape), group,     std::move(aliases),
                                std::move(strides), in_norm,          parameters};
           }),
           py::arg("name"), py::arg("shape"), py::arg("group") = 0,
           py::arg("aliases") = std::vector<std::string>{}, py::arg("strides") = std::vector<int64_t>{},
           py::arg("in_norm") = true, py::arg("parameters") = 0)
      .def_readonly("name", &SegmentSpec::name)
      .def_readonly("shape", &SegmentSpec::shape)
      .def_readonly("group", &SegmentSpec::group)
      .def_readonly("aliases", &SegmentSpec::aliases)
      .def_readonly("strides", &SegmentSpec::strides)
      .def_readonly("in_norm", &SegmentSpec::in_norm);
  m.attr("WITH_EACH_BLOCK") = engine::kWithEachBlock;
  py::class_<UnitSpec>(m, "Unit")
      .def(py::init([](std::string name, const std::string& format, std::string dtype,
                       std::vector<SegmentSpec> segments, const std::string& optimizer, std::string packing,
                       int32_t together, int64_t part_bytes) {
             return UnitSpec{std::move(name),
                             engine::format_from_name(format),
                             std::move(dtype),
                             std::move(segments),
                             optim::optimizer_named(optimizer),
                             std::move(packing),
                             together,
                             part_bytes};
           }),
           py::arg("name"), py::arg("format"), py::arg("dtype"), py::arg("segments"),
           py::arg("optimizer") = "adam", py::arg("packing") = "", py::arg("together") = -1,
           py::arg("part_bytes") = 0)
      .def_readonly("name", &UnitSpec::name)
      .def_property_readonly(
          "format", [](const UnitSpec& self) { return std::string(engine::format_name(self.format)); })
      .def_readonly("dtype", &UnitSpec::dtype)
      .def_readonly("segments", &UnitSpec::segments);
}

void register_config(py::module_& m) {
  py::class_<PythonConfig>(m, "Config")
      .def(py::init<>())
      .def_readwrite("host_budget_bytes", &PythonConfig::host_budget_bytes)
      .def_readwrite("activations_bytes", &PythonConfig::activations_bytes)
      .def_readwrite("device_budget_bytes", &PythonConfig::device_budget_bytes)
      .def_readwrite("nvme", &PythonConfig::nvme)
      .def_readwrite("job", &PythonConfig::job)
      .def_readwrite("threads", &PythonConfig::threads)
      .def_readwrite("prefetch_units", &PythonConfig::prefetch_units)
      .def_readwrite("speculate", &PythonConfig::speculate)
      .def_readwrite("gradient_accumulation", &PythonConfig::gradient_accumulation)
      .def_readwrite("micro_batches_together", &PythonConfig::micro_batches_together)
      .def_readwrite("max_grad_norm", &PythonConfig::max_grad_norm)
      .def_readwrite("sum_over_ranks", &PythonConfig::sum_over_ranks)
      .def_readwrite("skip_nonfinite", &PythonConfig::skip_nonfinite)
      .def_readwrite("chunk_elements", &PythonConfig::chunk_elements)
      .def_readwrite("stage", &PythonConfig::stage)
      .def_readwrite("bucket_bytes", &PythonConfig::bucket_bytes)
      .def_readwrite("rank_timeout_ms", &PythonConfig::rank_timeout_ms)
      .def_readwrite("io_deadline_ms", &PythonConfig::io_deadline_ms)
      .def_property(
          "placement", [](const PythonConfig& self) { return placement_name(self.placement); },
          [](PythonConfig& self, const std::string& name) { self.placement = placement_from(name); })
      .def_readwrite("poison", &PythonConfig::poison)
      .def_readwrite("checkpoints_kept", &PythonConfig::checkpoints_kept)
      .def_readwrite("take_over", &PythonConfig::take_over)
      .def_readwrite("train_after_save", &PythonConfig::train_after_save)
      .def_readwrite("device", &PythonConfig::device)
      .def_readwrite("io_backend", &PythonConfig::io_backend)
      .def_readwrite("seed", &PythonConfig::seed)
      .def_readwrite("rounding_seed", &PythonConfig::rounding_seed);
}

void register_weights(EngineClass& cls) {
  using Released = py::call_guard<py::gil_scoped_release>;
  cls.def(
         "load_weight",
         [](Engine& self, int32_t unit, int32_t segment, uintptr_t address, int64_t bytes,
            const std::string& dtype) { self.load_weight(unit, segment, memory_at(address, bytes), dtype); },
         Released())
      .def(
          "read_weight",
          [](Engine& self, int32_t unit, int32_t segment, uintptr_t address, int64_t bytes,
             const std::string& dtype) { self.read_weight(unit, segment, memory_at(address, bytes), dtype); },
          Released())
      .def(
          "read_state",
          [](Engine& self, int32_t unit, int32_t segment, const std::string& name, uintptr_t address,
             int64_t bytes) { self.read_state(unit, segment, name, floats_at<float>(address, bytes)); },
          Released())
      .def(
          "read_part",
          [](Engine& self, int32_t unit, int32_t segment, int64_t begin, uintptr_t address, int64_t bytes) {
            self.read_part(unit, segment, begin, memory_at(address, bytes));
          },
          Released())
      .def("own_part", &Engine::own_part, Released())
      .def(
          "read_own_state",
          [](Engine& self, int32_t unit, int32_t segment, const std::string& name, uintptr_t address,
             int64_t bytes) { self.read_own_state(unit, segment, name, floats_at<float>(address, bytes)); },
          Released())
      .def(
          "write_state",
          [](Engine& self, int32_t unit, int32_t segment, const std::string& name, uintptr_t address,
             int64_t bytes) {
            self.write_state(unit, segment, name, floats_at<const float>(address, bytes));
          },
          Released())
      .def(
          "written",
          [](Engine& self, int32_t unit, int32_t segment, uintptr_t address, int64_t bytes) {
            self.written(unit, segment, memory_at(address, bytes));
          },
          Released())
      .def("updates_of", &Engine::updates_of, Released())
      .def("set_updates_of", &Engine::set_updates_of, Released());
}

void register_gradients(EngineClass& cls) {
  using Released = py::call_guard<py::gil_scoped_release>;
  cls.def(
         "add_gradient",
         [](Engine& self, int32_t unit, int32_t segment, uintptr_t address, int64_t bytes,
            const std::string& dtype) { self.add_gradient(unit, segment, memory_at(address, bytes), dtype); },
         Released())
      .def(
          "replace_gradient",
          [](Engine& self, int32_t unit, int32_t segment, uintptr_t address, int64_t bytes,
             const std::string& dtype) {
            self.replace_gradient(unit, segment, memory_at(address, bytes), dtype);
          },
          Released())
      .def(
          "read_gradient",
          [](Engine& self, int32_t unit, int32_t segment, uintptr_t address, int64_t bytes,
             const std::string& dtype) {
            self.read_gradient(unit, segment, memory_at(address, bytes), dtype);
          },
          Released())
      .def("read_whole_gradient", about_whole(&Engine::read_whole_gradient), Released())
      .def("read_own_gradient", about_whole(&Engine::read_own_gradient), Released())
      .def("replace_whole_gradient", about_whole(&Engine::replace_whole_gradient), Released())
      .def("clear_gradients", about(&Engine::clear_gradients), py::arg("groups") = py::none(), Released())
      .def("zero_gradients", about(&Engine::zero_gradients), py::arg("groups") = py::none(), Released())
      .def("reuse_gradients", &Engine::reuse_gradients, Released())
      .def("clipped_by_caller", &Engine::clipped_by_caller, Released())
      .def("set_loss_scale", &Engine::set_loss_scale, Released())
      .def("use_gradients", about(&Engine::use_gradients), py::arg("groups") = py::none(), Released())
      .def("skip_step", about(&Engine::skip_step), py::arg("groups") = py::none(), Released())
      .def("has_gradient", &Engine::has_gradient, Released())
      .def("grad_norm", about(&Engine::grad_norm), py::arg("groups") = py::none(), Released())
      .def("clip_grad_norm", &Engine::clip_grad_norm, Released());
}

/// What the journal holds, to a file for Perfetto; the journal is empty afterwards.
void write_chrome_trace(Engine& engine, const std::filesystem::path& path) {
  const auto entries = engine.take_journal();
  const auto device = engine.take_device_spans();
  std::ofstream out(path);
  engine::write_chrome_trace(out, engine.layout(), entries, device);
  if (!out.flush()) throw std::runtime_error("the trace could not be written to " + path.string());
}

void register_passes(EngineClass& cls) {
  using Released = py::call_guard<py::gil_scoped_release>;
  cls.def(
         "begin_pass",
         [](Engine& self, bool training, bool grad_enabled) {
           self.begin_pass({training, grad_enabled});
         },
         py::arg("training"), py::arg("grad_enabled"), Released())
      .def("resident_now", &Engine::resident_now, Released())
      .def("generation", &Engine::generation, Released())
      .def("expect_step",
           [](Engine& self, const std::vector<py::dict>& groups) {
             const auto configs = hypers(groups);
             const py::gil_scoped_release release;
             self.expect_step(configs);
           })
      .def(
          "step",
          [](Engine& self, const std::vector<py::dict>& groups, const GivenRange& range) {
            const auto configs = hypers(groups);
            const py::gil_scoped_release release;
            return self.step(configs, range_of(range));
          },
          py::arg("groups"), py::arg("range") = py::none())
      .def("start_states",
           [](Engine& self, const std::vector<py::dict>& groups) {
             const auto configs = hypers(groups);
             const py::gil_scoped_release release;
             self.start_states(configs);
           })
      .def("synchronize", &Engine::synchronize, Released())
      .def("save", py::overload_cast<const std::filesystem::path&, std::string_view>(&Engine::save),
           py::arg("folder"), py::arg("extra_json"), Released())
      .def("save", py::overload_cast<const std::filesystem::path&, const engine::WriteBeside&>(&Engine::save),
           py::arg("folder"), py::arg("write_beside"), Released())
      .def("save_in_background", &Engine::save_in_background, py::arg("folder"), py::arg("write_beside"),
           Released())
      .def("wait_for_save", &Engine::wait_for_save, Released())
      .def("wait_for_snapshot", &Engine::wait_for_snapshot, Released())
      .def("load", &Engine::load, py::arg("folder"), Released());
}

void register_looks(EngineClass& cls) {
  using Released = py::call_guard<py::gil_scoped_release>;
  cls.def("stats", &stats_dict)
      .def("stall", &Engine::stall)
      .def("hurry_save", &Engine::hurry_save)
      .def("save_progress",
           [](const Engine& self) {
             const engine::SaveProgress progress = self.save_progress();
             py::dict d;
             d["under_way"] = progress.under_way;
             d["bytes"] = progress.bytes;
             d["done_bytes"] = progress.done_bytes;
             return d;
           })
      .def("report", &Engine::report, Released())
      .def("report_inside", &Engine::report_inside, Released())
      .def("report_sum", &Engine::report_sum, Released())
      .def("begin_backward", &Engine::begin_backward, Released())
      .def_property_readonly("plan", &Engine::plan)
      .def("record_journal", &Engine::record_journal, Released())
      .def("take_journal",
           [](Engine& self) {
             py::list out;
             for (const engine::JournalEntry& e : self.take_journal()) {
               out.append(
                   py::make_tuple(e.time_ns, engine::happening_name(e.happening), e.unit, e.chunk, e.slot));
             }
             return out;
           })
      .def("take_device_spans",
           [](Engine& self) {
             std::vector<engine::DeviceSpan> spans;
             {
               const py::gil_scoped_release release;
               spans = self.take_device_spans();
             }
             py::list out;
             for (const engine::DeviceSpan& s : spans)
               out.append(py::make_tuple(s.begin_ns, s.end_ns, engine::span_name(s.kind), s.unit));
             return out;
           })
      .def("write_chrome_trace", &write_chrome_trace, py::arg("path"), Released());
}

/// `nccl`: the library's path, where one carries what is large between the ranks' GPUs.
Holder make_engine(const std::vector<UnitSpec>& units, const PythonConfig& config, py::object group,
                   py::object model_group, const py::object& device, const std::optional<std::string>& nccl) {
  const auto communicator = [](py::object of) {
    return of.is_none() ? nullptr : make_group_communicator(std::move(of));
  };
  auto ranks = communicator(std::move(group));
  auto model_ranks = communicator(std::move(model_group));
  engine::ResourceOptions options = config;
  options.given_device = device_of(device);
  const py::gil_scoped_release release;
  if (nccl && ranks != nullptr) {
    if (options.given_device == nullptr) options.given_device = engine::make_device(config.device);
    engine::NcclOptions over;
    over.library = *nccl;
    over.timeout = std::chrono::milliseconds(config.rank_timeout_ms);
    ranks = engine::make_nccl_communicator(std::move(ranks), options.given_device, over);
  }
  engine::Resources resources = engine::make_resources(units, config, options, std::move(ranks));
  resources.ranks.model_ranks = std::move(model_ranks);
  return Holder(new Engine(units, config, std::move(resources)));
}

}  // namespace

void EngineDeleter::operator()(Engine* engine) const {
  const py::gil_scoped_release release;
  delete engine;
}

void register_engine(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  register_specs(m);
  register_config(m);
  register_plan(m);
  py::class_<engine::StepResult>(m, "StepResult")
      .def_readonly("step", &engine::StepResult::step)
      .def_readonly("norm", &engine::StepResult::norm)
      .def_readonly("clip", &engine::StepResult::clip)
      .def_readonly("skipped", &engine::StepResult::skipped)
      .def_readonly("not_finite", &engine::StepResult::not_finite);
  m.def("why_no_cuda", &kernels::why_no_cuda, py::arg("ordinal") = 0,
        "Why the engine cannot use this GPU; empty where it can.");
  m.def("why_no_nccl", &why_no_nccl, py::arg("library"),
        "Why this NCCL library cannot be used (\"\": the one that the loader finds); empty where it can.");

  EngineClass cls(m, "Engine");
  cls.def(py::init(&make_engine), py::arg("units"), py::arg("config"), py::arg("group") = py::none(),
          py::arg("model_group") = py::none(), py::arg("device") = py::none(), py::arg("nccl") = py::none(),
          "`group`: an overspill.ranks.Group, or None for one rank. `model_group`: the same, of those that "
          "hold the rest of the model. `device`: a capsule, where the core does not make one by its name. "
          "`nccl`: the path of the library that carries what is large between the ranks' GPUs, None for the "
          "group alone.")
      .def("layout",
           [](Engine& self, int32_t unit) {
             const engine::Unit& u = self.layout().units.at(unit);
             std::vector<int64_t> offsets;
             for (const engine::Segment& s : u.segments) offsets.push_back(s.begin * u.element_bytes);
             return offsets;
           })
      .def("unit_bytes", [](Engine& self, int32_t unit) { return self.layout().units.at(unit).bytes(); })
      .def("close", &Engine::close, Released());
  register_weights(cls);
  register_gradients(cls);
  register_passes(cls);
  register_looks(cls);
  add_memory(m, cls);
  add_predict(cls);
}

}  // namespace overspill::bindings
