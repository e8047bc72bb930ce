// Rows of bench-ranks over a torch.distributed group: each rank's process calls it
// (bench/ranks/gloo.py).
#include <pybind11/pybind11.h>

#include "bench/ranks/row.h"
#include "bindings/group_communicator.h"

namespace py = pybind11;

PYBIND11_MODULE(_bench_ranks, m) {
  m.def(
      "measure_row",
      [](int stage, const py::function& join) {
        const py::gil_scoped_release release;
        return overspill::bench::measure_row("gloo", stage, [&] {
          const py::gil_scoped_acquire gil;
          return overspill::bindings::make_group_communicator(join());
        });
      },
      py::arg("stage"), py::arg("join"),
      "Collective. join() gives an overspill.ranks.Group of its own each time.");
}
