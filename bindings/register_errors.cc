#include "bindings/bindings.h"
#include "engine/checkpoint/manifest.h"
#include "engine/collectives/communicator.h"
#include "engine/memory/budget.h"
#include "engine/schedule/context.h"
#include "io/error.h"

namespace overspill::bindings {

namespace py = pybind11;

void register_errors(py::module_& m) {
  static py::exception<std::runtime_error> base(m, "OverspillError", PyExc_RuntimeError);
  py::register_exception<engine::BudgetError>(m, "BudgetError", base);
  py::register_exception<engine::CheckpointError>(m, "CheckpointError", base);
  py::register_exception<engine::CommunicatorError>(m, "CommunicatorError", base);
  py::register_exception<engine::EngineFailed>(m, "EngineFailed", base);
  py::register_exception<io::StoreError>(m, "StoreError", base);
}

}  // namespace overspill::bindings
