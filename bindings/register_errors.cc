#include <exception>
#include <string>

#include "bindings/bindings.h"
#include "engine/base/engine_failed.h"
#include "engine/checkpoint/manifest.h"
#include "engine/collectives/communicator.h"
#include "engine/engine.h"
#include "engine/memory/budget.h"
#include "inference/error.h"
#include "io/error.h"
#include "io/store.h"

namespace overspill::bindings {

namespace py = pybind11;

namespace {

/// Thrown, the error becomes one of `type`, which lives as long as the module. A message may have a path in
/// it, and a path may be any bytes: those that are no UTF-8 are escaped.
template <class Error>
void translate(const py::handle& type) {
  static py::handle to;
  to = type;
  // NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11 takes such functions by value only
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      PyErr_SetObject(to.ptr(), text(error.what()).ptr());
    }
  });
}

template <class Error>
void register_error(py::module_& m, const char* name, const py::handle& base) {
  static py::exception<Error> type(m, name, base);
  translate<Error>(type);
}

}  // namespace

py::object text(const std::string& bytes) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "backslashreplace"));
}

void register_errors(py::module_& m) {
  static py::exception<std::runtime_error> base(m, "OverspillError", PyExc_RuntimeError);
  register_error<engine::BudgetError>(m, "BudgetError", base);
  register_error<inference::NoRoom>(m, "NoRoom", m.attr("BudgetError"));
  register_error<engine::CheckpointError>(m, "CheckpointError", base);
  register_error<engine::CommunicatorError>(m, "CommunicatorError", base);
  register_error<engine::EngineFailed>(m, "EngineFailed", base);
  register_error<engine::WrongProcess>(m, "WrongProcess", base);
  translate<inference::WrongProcess>(m.attr("WrongProcess"));
  register_error<inference::ModelError>(m, "ModelError", base);
  register_error<inference::UnknownModel>(m, "UnknownModel", m.attr("ModelError"));  // asked before its base
  register_error<inference::QueueFull>(m, "QueueFull", base);
  register_error<io::StoreError>(m, "StoreError", base);
}

}  // namespace overspill::bindings
