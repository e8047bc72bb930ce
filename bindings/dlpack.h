// Memory handed to Python as a DLPack capsule (github.com/dmlc/dlpack, version 0.8's C layout): any framework
// can view it without copying, and tells when the last view has died.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

namespace overspill::bindings {

struct DLDevice {
  int32_t device_type;  // 1: CPU
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;  // 1: unsigned integer
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

/// A one-dimensional uint8 view of `owner`'s memory. The owner is destroyed when the last tensor made of the
/// capsule dies, or with the capsule when none was made; with or without the GIL, on any thread.
template <class Owner>
pybind11::capsule make_capsule(Owner owner, std::byte* data, int64_t bytes) {
  struct Managed {
    Owner owner;
    int64_t shape;
    DLManagedTensor tensor;
  };
  auto managed = std::make_unique<Managed>(Managed{std::move(owner), bytes, {}});
  managed->tensor.dl_tensor = {data, {1, 0}, 1, {1, 8, 1}, &managed->shape, nullptr, 0};
  managed->tensor.manager_ctx = managed.get();
  managed->tensor.deleter = [](DLManagedTensor* self) { delete static_cast<Managed*>(self->manager_ctx); };
  PyObject* capsule = PyCapsule_New(&managed->tensor, "dltensor", [](PyObject* object) {
    if (PyCapsule_IsValid(object, "dltensor") == 0) return;  // consumed: the tensor owns it now
    auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(object, "dltensor"));
    tensor->deleter(tensor);
  });
  if (capsule == nullptr) throw pybind11::error_already_set();
  static_cast<void>(managed.release());  // the capsule owns it
  return pybind11::reinterpret_steal<pybind11::capsule>(capsule);
}

}  // namespace overspill::bindings
