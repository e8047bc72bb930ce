// What an engine says of its plan and of what it did, as Python's dictionaries.
#pragma once

#include <pybind11/pybind11.h>

#include "engine/engine.h"
#include "engine/plan/plan.h"

namespace overspill::bindings {

pybind11::dict plan_dict(const engine::Plan& plan);
/// Called with the GIL; given up while the engine is asked.
pybind11::dict stats_dict(engine::Engine& self);

}  // namespace overspill::bindings
