#include "bindings/bindings.h"
#include "bindings/last_words.h"

namespace overspill::bindings {

namespace py = pybind11;

void register_ranks(py::module_& m) {
  m.def("linger_when_terminated", &linger_when_terminated, py::arg("seconds"),
        "After SIGTERM the process lives on for so long. False where the program handles SIGTERM itself.");
}

}  // namespace overspill::bindings
