// Batches of texts (inference/run/batch.h). Every call that may wait releases the GIL.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "inference/run/batch.h"
#include "io/own_process.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using inference::Answer;
using inference::Batch;
using inference::Drawn;
using inference::End;

/// Batches whose last owner was a constraint of their own: that thread cannot wait for itself. They end
/// before Python does, whose code they may still run. Threads: those that hold the GIL.
std::vector<std::unique_ptr<Batch>>& left_batches() {
  static std::vector<std::unique_ptr<Batch>> left;
  return left;
}

void end_left_batches() {
  const auto left = std::exchange(left_batches(), {});
  const py::gil_scoped_release released;
  for (const auto& batch : left) batch->close();
}

// In a forked child the batch's thread is not there, and to end it would wait for ever: the child leaves it.
std::shared_ptr<Batch> open(std::shared_ptr<inference::Model> model, int64_t texts, int64_t positions,
                            int64_t waiting) {
  auto made = std::make_unique<Batch>(std::move(model), inference::BatchOptions{texts, positions, waiting});
  return {made.release(), [process = io::OwnProcess()](Batch* batch) {
            if (!process.here()) return;
            std::unique_ptr<Batch> ended(batch);
            if (ended->is_inside()) return left_batches().push_back(std::move(ended));
            const py::gil_scoped_release released;
            ended.reset();
          }};
}

/// A constraint in Python: called with how many tokens the text has, the last of them, and where the logits
/// are.
using Excluding = std::function<void(int64_t, int32_t, uintptr_t, int64_t)>;

inference::Constraint constraint_of(Excluding excluding) {
  if (!excluding) return {};
  return [excluding = std::move(excluding)](std::span<const int32_t> history, std::span<float> logits) {
    const py::gil_scoped_acquire held;
    try {
      excluding(static_cast<int64_t>(history.size()), history.back(),
                reinterpret_cast<uintptr_t>(logits.data()), static_cast<int64_t>(logits.size()));
    } catch (const py::error_already_set& error) {
      throw std::invalid_argument(error.what());  // ends this text, and not the batch
    }
  };
}

std::shared_ptr<Answer> submit(Batch& batch, std::vector<int32_t> tokens, int64_t max_new_tokens,
                               float temperature, int64_t top_k, float top_p, float min_p, float repetition,
                               uint64_t seed, std::vector<std::pair<int32_t, float>> bias,
                               std::vector<int32_t> end_tokens, int64_t log_probabilities, int64_t lookup,
                               Excluding constraint) {
  return batch.submit({.tokens = std::move(tokens),
                       .new_tokens_max = max_new_tokens,
                       .sampling = {temperature, top_k, top_p, min_p, repetition, seed, std::move(bias),
                                    constraint_of(std::move(constraint))},
                       .end_tokens = std::move(end_tokens),
                       .log_probabilities = log_probabilities,
                       .lookup = lookup});
}

std::optional<std::string> finish_reason(const Answer& answer) {
  const std::optional<End> end = answer.ended();
  if (!end) return std::nullopt;
  switch (*end) {
    case End::stop:
      return "stop";
    case End::length:
      return "length";
    case End::cancelled:
      return "cancelled";
    case End::failed:
      return "failed";
  }
  return std::nullopt;
}

}  // namespace

void register_batch(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Drawn>(m, "InferenceDrawn")
      .def_readonly("token", &Drawn::token)
      .def_readonly("log_probability", &Drawn::log_probability)
      .def_readonly("likeliest", &Drawn::likeliest);
  py::class_<Answer, std::shared_ptr<Answer>>(m, "InferenceAnswer")
      .def(
          "wait",
          [](Answer& self, double seconds) {
            return self.wait(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)));
          },
          py::arg("seconds"), Released())
      .def("take", &Answer::take, Released())
      .def_property_readonly("finish_reason", &finish_reason)
      .def("cancel", &Answer::cancel, Released());
  py::module_::import("atexit").attr("register")(py::cpp_function(&end_left_batches));
  py::class_<Batch, std::shared_ptr<Batch>>(m, "InferenceBatch")
      .def(py::init(&open), py::arg("model"), py::arg("texts"), py::arg("positions"), py::arg("waiting"),
           Released())
      .def("submit", &submit, py::kw_only(), py::arg("tokens"), py::arg("max_new_tokens"),
           py::arg("temperature"), py::arg("top_k"), py::arg("top_p"), py::arg("min_p"),
           py::arg("repetition"), py::arg("seed"), py::arg("bias"), py::arg("end_tokens"),
           py::arg("log_probabilities"), py::arg("lookup"), py::arg("constraint") = py::none(), Released())
      .def("close", &Batch::close, Released())
      .def_property_readonly("is_inside", &Batch::is_inside)
      .def_property_readonly("counts", [](const Batch& self) {
        const auto counts = [&] {
          const py::gil_scoped_release released;
          return self.counts();
        }();
        return std::map<std::string, int64_t>{{"passes", counts.passes},
                                              {"computed", counts.computed},
                                              {"reused", counts.reused},
                                              {"guessed", counts.guessed},
                                              {"put_back", counts.put_back}};
      });
}

}  // namespace overspill::bindings
