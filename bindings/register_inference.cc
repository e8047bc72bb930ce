// Models that are run, not trained (inference/run/model.h, session.h). Every call that computes releases the
// GIL.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "inference/kernels/forms.h"
#include "inference/model/families.h"
#include "inference/run/model.h"
#include "inference/run/sampler.h"
#include "inference/run/session.h"
#include "io/own_process.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using inference::Model;
using inference::Sampler;
using inference::Session;
using Tokens = std::vector<int32_t>;

std::span<float> floats_at(uintptr_t address, int64_t count) {
  const std::span<std::byte> bytes = memory_at(address, count * static_cast<int64_t>(sizeof(float)));
  return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
}

inference::WeightFormat format_of(const std::string& name) {
  if (name == "12bit") return inference::WeightFormat::coded;
  if (name == "q8") return inference::WeightFormat::int8;
  if (name.empty()) return inference::WeightFormat::as_stored;
  throw std::invalid_argument(name + " is no format of weights");
}

inference::CacheFormat cache_format_of(const std::string& name) {
  if (name == "int8") return inference::CacheFormat::int8;
  if (name.empty()) return inference::CacheFormat::as_computed;
  throw std::invalid_argument(name + " is no format of a cache");
}

std::shared_ptr<Model> load(const std::string& folder, int threads, const std::string& weights,
                            const std::string& cache, std::optional<int64_t> budget_bytes, int64_t positions,
                            int64_t rows) {
  const inference::ModelOptions options{.threads = threads,
                                        .rows_max = rows,
                                        .weights = format_of(weights),
                                        .cache = cache_format_of(cache),
                                        .budget_bytes = budget_bytes,
                                        .positions = positions};
  auto made = std::make_unique<Model>(folder, options, inference::kernels());
  // In a forked child its threads are not there, and to end them would wait for ever: the child leaves it.
  return {made.release(), [process = io::OwnProcess()](Model* model) {
            if (process.here()) const std::unique_ptr<Model> ended(model);
          }};
}

std::unique_ptr<Sampler> make_sampler(float temperature, int64_t top_k, float top_p, float min_p,
                                      float repetition, uint64_t seed,
                                      std::vector<std::pair<int32_t, float>> bias) {
  return std::make_unique<Sampler>(
      inference::Sampling{temperature, top_k, top_p, min_p, repetition, seed, std::move(bias)});
}

}  // namespace

void register_inference(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  m.def("inference_families", &inference::family_names, "The values of model_type that are known.");
  py::class_<Model, std::shared_ptr<Model>>(m, "InferenceModel")
      .def(py::init(&load), py::arg("folder"), py::arg("threads"), py::arg("weights"), py::arg("cache"),
           py::arg("budget_bytes"), py::arg("positions"), py::arg("rows"), Released())
      .def_property_readonly("family", [](const Model& self) { return self.spec().family; })
      .def_property_readonly("vocabulary", [](const Model& self) { return self.spec().vocabulary; })
      .def_property_readonly("context", [](const Model& self) { return self.spec().context; })
      .def_property_readonly("has_position_table",
                             [](const Model& self) { return self.spec().positions.has_value(); })
      .def_property_readonly("end_tokens", &Model::end_tokens)
      .def_property_readonly("threads", &Model::threads)
      .def_property_readonly("weight_bytes", &Model::weight_bytes)
      .def_property_readonly("streamed_bytes", &Model::streamed_bytes)
      .def_property_readonly("read_bytes", &Model::read_bytes)
      .def("seconds_a_pass", &Model::seconds_a_pass, Released())
      .def_property_readonly("kernels", [](const Model& self) { return std::string(self.kernels().name); });
  const inference::Sampling none;
  py::class_<Sampler>(m, "InferenceSampler")
      .def(py::init(&make_sampler), py::kw_only(), py::arg("temperature") = none.temperature,
           py::arg("top_k") = none.top_k, py::arg("top_p") = none.top_p, py::arg("min_p") = none.min_p,
           py::arg("repetition") = none.repetition, py::arg("seed") = none.seed, py::arg("bias") = none.bias);
  py::class_<Session>(m, "InferenceSession")
      .def(py::init<std::shared_ptr<Model>, int64_t>(), py::arg("model"), py::arg("capacity"))
      .def_property_readonly("length", &Session::length)
      .def_property_readonly("capacity", &Session::capacity)
      .def("rewind", &Session::rewind, py::arg("length"), Released())
      .def(
          "extend_all",
          [](Session& self, const Tokens& tokens, uintptr_t address, int64_t count) {
            self.extend_all(tokens, floats_at(address, count));
          },
          py::arg("tokens"), py::arg("address"), py::arg("count"), Released(),
          "Reads tokens; their logits, [tokens][vocabulary] fp32, go to contiguous memory at the address.")
      .def(
          "score", [](Session& self, const Tokens& tokens) { return self.score(tokens); }, py::arg("tokens"),
          Released())
      .def(
          "draw",
          [](Session& self, const Tokens& tokens, Sampler& sampler, int64_t lookup) {
            return self.draw(tokens, sampler, lookup);
          },
          py::arg("tokens"), py::arg("sampler"), py::arg("lookup"), Released(),
          "Reads the tokens and draws the one after them; more than one where guesses were right.");
}

}  // namespace overspill::bindings
