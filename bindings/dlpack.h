// Memory handed to Python, and taken from it, as a DLPack capsule (github.com/dmlc/dlpack, version 0.8's C
// layout): any framework can view it without copying, and tells when the last view has died.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <stdexcept>

#include "engine/base/device_array.h"

namespace overspill::bindings {

struct DLDevice {
  int32_t device_type;  // 1: CPU, 2: CUDA, 12: an extension of the framework's
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;  // 1: unsigned integer, 2: IEEE floating point, 4: bfloat16
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

inline constexpr DLDevice kCpu{1, 0};

/// A one-dimensional uint8 view of `owner`'s memory, which lies on `device`. The owner is destroyed when the
/// last tensor made of the capsule dies, or with the capsule when none was made; with or without the GIL, on
/// any thread.
template <class Owner>
pybind11::capsule make_capsule(Owner owner, std::byte* data, int64_t bytes, DLDevice device = kCpu) {
  struct Managed {
    Owner owner;
    int64_t shape;
    DLManagedTensor tensor;
  };
  auto managed = std::make_unique<Managed>(Managed{std::move(owner), bytes, {}});
  managed->tensor.dl_tensor = {data, device, 1, {1, 8, 1}, &managed->shape, nullptr, 0};
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

/// The one-dimensional, contiguous memory of a capsule, which is used up; its tensor lives as long as the
/// array's owner. The dtype is safetensors' name of it, "?" where it is none of F32, F16, BF16. Throws
/// std::invalid_argument for another capsule, or another shape. Needs the GIL; letting the owner go does not.
inline engine::DeviceArray take_capsule(const pybind11::capsule& capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor") == 0)
    throw std::invalid_argument("a DLPack capsule is expected that was not used up");
  auto* const managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  const DLTensor& tensor = managed->dl_tensor;
  if (tensor.ndim != 1 || tensor.dtype.lanes != 1 ||
      (tensor.strides != nullptr && tensor.shape[0] > 1 && tensor.strides[0] != 1))
    throw std::invalid_argument("a DLPack capsule of one contiguous dimension is expected");
  if (PyCapsule_SetName(capsule.ptr(), "used_dltensor") != 0) throw pybind11::error_already_set();
  const std::shared_ptr<DLManagedTensor> owner(managed, [](DLManagedTensor* used) {
    if (used->deleter != nullptr) used->deleter(used);
  });
  constexpr uint8_t kFloat = 2, kBfloat = 4;
  const char* dtype = "?";
  if (tensor.dtype.code == kFloat && tensor.dtype.bits == 32) dtype = "F32";
  if (tensor.dtype.code == kFloat && tensor.dtype.bits == 16) dtype = "F16";
  if (tensor.dtype.code == kBfloat && tensor.dtype.bits == 16) dtype = "BF16";
  return {static_cast<const std::byte*>(tensor.data) + tensor.byte_offset,
          tensor.shape[0] * (tensor.dtype.bits / 8), dtype, owner};
}

}  // namespace overspill::bindings
