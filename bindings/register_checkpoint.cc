#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "engine/checkpoint/compare.h"
#include "engine/checkpoint/copy.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/parameters.h"
#include "engine/checkpoint/save_folder.h"
#include "io/part_folder.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using Progress = std::function<void(int64_t, int64_t)>;

void report(void* context, int64_t done, int64_t total) {
  const Progress& progress = *static_cast<const Progress*>(context);
  if (!progress) return;
  const py::gil_scoped_acquire acquire;
  progress(done, total);
}

/// Name, dtype, shape, data.
using Given = std::tuple<std::string, std::string, std::vector<int64_t>, py::bytes>;

py::dict merge(const std::filesystem::path& checkpoint, const std::filesystem::path& out,
               const std::string& dtype, int64_t shard_bytes, Progress progress,
               const std::vector<Given>& tensors) {
  engine::MergeOptions options{.dtype = dtype, .shard_bytes = shard_bytes};
  for (const auto& [name, given_dtype, shape, data] : tensors)
    options.tensors.push_back({name, given_dtype, shape, std::as_bytes(std::span(std::string_view(data)))});
  engine::MergeResult result;
  {
    const py::gil_scoped_release release;
    result = engine::merge_checkpoint(checkpoint, out, options, &report, &progress);
  }
  py::dict dict;
  dict["tensors"] = result.tensors;
  dict["bytes"] = result.bytes;
  dict["files"] = result.files;
  return dict;
}

py::dict verify(const std::filesystem::path& checkpoint, Progress progress) {
  engine::VerifyResult result;
  {
    const py::gil_scoped_release release;
    result = engine::verify_checkpoint(checkpoint, &report, &progress);
  }
  py::dict dict;
  dict["step"] = result.step;
  dict["parameters"] = result.parameters;
  dict["files"] = result.files;
  dict["bytes"] = result.bytes;
  return dict;
}

py::dict copy_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                         Progress progress) {
  engine::CopyResult result;
  {
    const py::gil_scoped_release release;
    result = engine::copy_checkpoint(from, to, &report, &progress);
  }
  py::dict dict;
  dict["files"] = result.files;
  dict["bytes"] = result.bytes;
  dict["kept"] = result.kept;
  return dict;
}

py::list compare_checkpoints(const std::filesystem::path& first, const std::filesystem::path& second,
                             Progress progress) {
  std::vector<engine::WeightDifference> found;
  {
    const py::gil_scoped_release release;
    found = engine::compare_weights(first, second, &report, &progress);
  }
  py::list list;
  for (const engine::WeightDifference& difference : found) {
    py::dict d;
    d["name"] = difference.name;
    d["elements"] = difference.elements;
    d["differing"] = difference.differing;
    d["largest"] = difference.largest;
    d["rms"] = difference.rms;
    d["rms_of_first"] = difference.rms_of_first;
    list.append(d);
  }
  return list;
}

py::dict manifest_dict(const engine::Manifest& manifest) {
  py::list units;
  for (const engine::ManifestUnit& unit : manifest.units) {
    py::list segments;
    for (const engine::ManifestSegment& segment : unit.segments) {
      py::dict s;
      s["name"] = segment.name;
      s["aliases"] = segment.aliases;
      s["shape"] = segment.shape;
      s["strides"] = segment.strides;
      s["step"] = segment.step;
      s["group"] = segment.group;
      s["trainable"] = segment.trainable;
      segments.append(s);
    }
    py::dict u;
    u["name"] = unit.name;
    u["optimizer"] = unit.optimizer;
    u["format"] = unit.format;
    u["components"] = unit.components;
    u["dtype"] = unit.dtype;
    u["segments"] = segments;
    units.append(u);
  }
  py::dict dict;
  dict["step"] = manifest.step;
  dict["skipped_steps"] = manifest.skipped_steps;
  dict["extra_json"] = manifest.extra_json;
  dict["units"] = units;
  return dict;
}

py::dict manifest(const std::filesystem::path& folder) {
  engine::Manifest manifest;
  {
    const py::gil_scoped_release release;
    manifest = engine::read_manifest(folder);
  }
  return manifest_dict(manifest);
}

void register_parameters(py::module_& m) {
  using engine::CheckpointParameters;
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<CheckpointParameters>(
      m, "CheckpointParameters",
      "The parameters of a checkpoint, each with its states: read one at a time, row-major, every byte "
      "verified.")
      .def(py::init<std::filesystem::path>(), py::arg("folder"), Released())
      .def(
          "manifest", [](const CheckpointParameters& self) { return manifest_dict(self.manifest()); },
          "As `manifest` of the folder.")
      .def(
          "read_weight",
          [](const CheckpointParameters& self, const std::string& parameter, const std::string& dtype,
             uintptr_t address,
             int64_t bytes) { self.read_weight(parameter, dtype, memory_at(address, bytes)); },
          py::arg("parameter"), py::arg("dtype"), py::arg("address"), py::arg("bytes"),
          "Fills the memory with the weight in a dtype of safetensors: the unit's own, or where it holds "
          "F16, BF16 or F32 also \"BF16\" or \"F32\", the exact master.",
          Released())
      .def(
          "read_state",
          [](const CheckpointParameters& self, const std::string& parameter, const std::string& state,
             uintptr_t address, int64_t bytes) {
            const auto to = memory_at(address, bytes);
            self.read_state(parameter, state,
                            {reinterpret_cast<float*>(to.data()), to.size() / sizeof(float)});
          },
          py::arg("parameter"), py::arg("state"), py::arg("address"), py::arg("bytes"),
          "The same of a state of the optimizer in fp32, by the name of the component that holds it.",
          Released());
}

}  // namespace

void register_checkpoint(py::module_& m) {
  m.def("merge", &merge, py::arg("checkpoint"), py::arg("out"), py::arg("dtype") = "bf16",
        py::arg("shard_bytes") = int64_t{5} << 30, py::arg("progress") = Progress(),
        py::arg("tensors") = std::vector<Given>(),
        "Streams a checkpoint into Hugging Face safetensors, in memory of about one tensor. `tensors` (name, "
        "safetensors' dtype, shape, bytes) are written beside.");
  m.def("verify", &verify, py::arg("checkpoint"), py::arg("progress") = Progress(),
        "Reads every byte but those of optimizer.safetensors, and compares it with its checksum.");
  m.def("manifest", &manifest, py::arg("folder"),
        "What a checkpoint folder holds; checked, but for the data itself.");
  m.def(
      "copy_checkpoint", &copy_checkpoint, py::arg("source"), py::arg("into"),
      py::arg("progress") = Progress(),
      "Copies what the manifest names, and the manifest last, into a folder that is there; goes on where an "
      "earlier copy was cut off.");
  m.def("compare_checkpoints", &compare_checkpoints, py::arg("first"), py::arg("second"),
        py::arg("progress") = Progress(), "How the weights of two checkpoints differ, by parameter.");
  register_parameters(m);
  m.attr("OWN_STATES_FILE") = engine::kOwnStatesFile;
  m.def(
      "parts_of",
      [](const std::filesystem::path& checkpoint) {
        std::vector<std::filesystem::path> paths;
        for (const io::PartFolder& part : io::parts_of(checkpoint)) {
          if (io::is_part(part)) paths.push_back(part.path);
        }
        return paths;
      },
      py::arg("checkpoint"),
      "The folders on other file systems that are parts of a checkpoint, and are there.");
  m.def(
      "remove_parts",
      [](const std::filesystem::path& checkpoint) {
        return io::remove_parts(checkpoint, &engine::is_file_of_a_save);
      },
      py::arg("checkpoint"), "Removes them; returns those that are still there.");
  m.def("note_owner", &io::note_owner, py::arg("checkpoint"),
        "Says in each of them where its checkpoint is now.");
  m.def(
      "is_file_of_a_save",
      [](const std::filesystem::path& name) { return engine::is_file_of_a_save(name.native()); },
      py::arg("name"), "Whether a save gives this name to a file in a checkpoint's folder.");
}

}  // namespace overspill::bindings
