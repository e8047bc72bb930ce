// Memory that Python sees without a copy: leased weights, gradients, and what released parameters lie over.
#include <memory>
#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "engine/engine.h"
#include "engine/memory/host_memory.h"
#include "io/checksum.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;
using engine::Engine;

py::capsule acquire(Engine& self, int32_t unit) {
  engine::Lease lease;
  {
    const py::gil_scoped_release release;
    lease = self.acquire(unit);
  }
  std::byte* data = lease.data();
  const int64_t bytes = lease.bytes();
  return make_capsule(std::move(lease), data, bytes);
}

/// A lease that a tensor over its memory holds, and Python beside it.
struct SharedLease {
  std::shared_ptr<engine::Lease> lease;
};

engine::Queue queue_at(uintptr_t native) {
  return {reinterpret_cast<void*>(native)};
}

/// The weights for what the queue is given from now on, as memory of DLPack's `device`, and the lease.
py::tuple acquire_on(Engine& self, int32_t unit, uintptr_t queue, int32_t device_type, int32_t device_id) {
  SharedLease held;
  {
    const py::gil_scoped_release release;
    held.lease = std::make_shared<engine::Lease>(self.acquire(unit, queue_at(queue)));
  }
  std::byte* data = held.lease->data();
  const int64_t bytes = held.lease->bytes();
  return py::make_tuple(make_capsule(held, data, bytes, {device_type, device_id}), held);
}

/// None where the engine has no room for it.
py::object keep_activation(Engine& self, uintptr_t address, int64_t bytes) {
  std::optional<engine::Activation> kept;
  {
    const py::gil_scoped_release release;
    kept = self.keep_activation(memory_at(address, bytes));
  }
  return kept ? py::cast(std::move(*kept)) : py::none();
}

void add_device_gradient(Engine& self, int32_t unit, int32_t segment, const py::capsule& gradient,
                         uintptr_t queue) {
  engine::DeviceArray array = take_capsule(gradient);
  const py::gil_scoped_release release;
  self.add_gradient(unit, segment, std::move(array), queue_at(queue));
}

/// What parameters on an accelerator lie over while they are released.
py::capsule device_nan_capsule(Engine& self, int64_t bytes, int32_t device_type, int32_t device_id) {
  struct Memory {
    std::shared_ptr<kernels::Device> device;
    kernels::DeviceMemory memory;
  };
  Memory made{self.device(), {}};
  made.memory = made.device->allocate_nan(bytes);
  std::byte* data = made.memory.data();
  return make_capsule(std::move(made), data, bytes, {device_type, device_id});
}

py::capsule nan_capsule(int64_t bytes) {
  auto pages = std::make_unique<engine::NanPages>(bytes);
  std::byte* data = pages->data();
  return make_capsule(std::move(pages), data, bytes);
}

py::capsule file_capsule(int file, int64_t bytes) {
  auto pages = std::make_unique<engine::FilePages>(file, bytes);
  std::byte* data = pages->data();
  return make_capsule(std::move(pages), data, bytes);
}

}  // namespace

void add_memory(py::module_& m, EngineClass& cls) {
  m.def("nan_capsule", &nan_capsule, py::arg("bytes"),
        "What released parameters' memory reads as, as a DLPack capsule.");
  m.def("file_capsule", &file_capsule, py::arg("file"), py::arg("bytes"),
        "The first bytes of an open file, mapped shared, as a DLPack capsule.");
  m.def(
      "digest",
      [](uintptr_t address, int64_t bytes) { return io::checksum_block(memory_at(address, bytes)); },
      py::arg("address"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>(),
      "XXH3-64 of host memory.");
  py::class_<SharedLease>(m, "Lease")
      .def(
          "use_on", [](SharedLease& self, uintptr_t queue) { self.lease->use_on(queue_at(queue)); },
          py::arg("queue"), py::call_guard<py::gil_scoped_release>(),
          "What the queue is given from now on sees the weights too.");
  py::class_<engine::Activation>(m, "Activation")
      .def(
          "read",
          [](const engine::Activation& self, uintptr_t address, int64_t bytes) {
            self.read(memory_at(address, bytes));
          },
          py::arg("address"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>(),
          "Fills memory of as many bytes; waits for them.");
  py::class_<engine::PartedGradient>(m, "PartedGradient")
      .def(
          "add",
          [](engine::PartedGradient& self, uintptr_t address, int64_t bytes) {
            self.add(memory_at(address, bytes));
          },
          py::arg("address"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>(),
          "The elements that follow those given before.")
      .def("finish", &engine::PartedGradient::finish, py::call_guard<py::gil_scoped_release>(),
           "From now on the segment has the gradient.")
      .def("break_off", &engine::PartedGradient::break_off, py::call_guard<py::gil_scoped_release>(),
           "The segment has no gradient now.");
  cls.def("acquire", &acquire)
      .def("begin_gradient", &Engine::begin_gradient, py::arg("unit"), py::arg("segment"), py::arg("dtype"),
           py::call_guard<py::gil_scoped_release>())
      .def("keep_activation", &keep_activation)
      .def("acquire_on", &acquire_on)
      .def("add_device_gradient", &add_device_gradient)
      .def("nan_capsule", &device_nan_capsule);
}

}  // namespace overspill::bindings
