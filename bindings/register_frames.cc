// What bindings/overspill/calls.py needs to know of Python's frames, and Python's own functions cannot tell
// it safely.
#include "bindings/bindings.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;

/// A collection may run any Python code, and so give up the GIL.
class NoCollection {
 public:
  NoCollection() : was_(PyGC_Disable()) {}
  ~NoCollection() {
    if (was_ != 0) PyGC_Enable();
  }
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;

 private:
  int was_;
};

/// The frame under another one, or on top of a thread's stack; nothing where that is the last.
py::object taken(PyFrameObject* frame) {
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(frame));
}

/// Those of `wanted` that are on the stack of the thread `ident`, none where it has ended. The GIL is held
/// from the first frame to the last, so the stack stands still. sys._current_frames would make frames under a
/// lock of the interpreter: a collection there may give up the GIL, and a thread that starts then waits for
/// the lock with the GIL.
py::list frames_on_stack(unsigned long ident, const py::list& wanted) {
  const NoCollection still;
  py::list found;
  for (PyThreadState* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get()); state != nullptr;
       state = PyThreadState_Next(state)) {
    if (state->thread_id != ident)
      continue;  // a thread that has not begun has the one of who starts it, and no frame
    for (py::object frame = taken(PyThreadState_GetFrame(state)); frame;
         frame = taken(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr())))) {
      for (const py::handle each : wanted) {
        if (each.is(frame)) found.append(frame);
      }
    }
  }
  return found;
}

/// An `__exit__` that sets `left` of its object before it calls `release`. It is not made of Python, because
/// Ctrl-C that strikes in the last statement of a `with` is raised where the next function of Python begins,
/// before its first line.
py::object leave_block() {
  const py::cpp_function leave([](const py::object& block, const py::args&) {
    block.attr("left") = true;
    block.attr("release")();
  });
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(leave.ptr()));
}

}  // namespace

void register_frames(py::module_& m) {
  m.def("frames_on_stack", &frames_on_stack, py::arg("ident"), py::arg("wanted"),
        "Those of the frames `wanted` that are on the stack of the thread with this threading.get_ident().");
  m.attr("leave_block") = leave_block();
}

}  // namespace overspill::bindings
