// One function a bound part; module.cc calls them all.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cpu_optim/optimizer.h"

namespace overspill::engine {
class Engine;
}

namespace overspill::bindings {

/// An engine that Python lets go ends without the GIL: its threads may need it to end.
struct EngineDeleter {
  void operator()(engine::Engine* engine) const;
};
using EngineClass = pybind11::class_<engine::Engine, std::unique_ptr<engine::Engine, EngineDeleter>>;

/// For people: bytes that are no UTF-8, as a path may have them, are escaped.
pybind11::object text(const std::string& bytes);

void register_errors(pybind11::module_& m);
void register_report(pybind11::module_& m);  // before the engine, which returns it
void add_predict(EngineClass& cls);
void add_memory(pybind11::module_& m, EngineClass& cls);
void register_plan(
    pybind11::module_& m);  // by register_engine, between the types it takes and those it gives
void register_engine(pybind11::module_& m);
void register_checkpoint(pybind11::module_& m);
void register_doctor(pybind11::module_& m);
void register_optim(pybind11::module_& m);
void register_frames(pybind11::module_& m);
void register_ranks(pybind11::module_& m);
void register_inference(pybind11::module_& m);
void register_batch(pybind11::module_& m);

/// A group's hyper-parameters: `group` has the optimizer's fields by name, and may have more.
optim::Hyper hyper_from(const std::string& optimizer, const pybind11::dict& group);

/// Memory of a tensor, given as its address and size: contiguous, on the host, alive during the call.
inline std::span<std::byte> memory_at(uintptr_t address, int64_t bytes) {
  if (bytes < 0 || (address == 0 && bytes > 0))
    throw std::invalid_argument("address and size do not name memory");
  return {reinterpret_cast<std::byte*>(address), static_cast<size_t>(bytes)};
}

}  // namespace overspill::bindings
