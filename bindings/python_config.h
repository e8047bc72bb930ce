// A configuration as Python gives it: of the engine, and of what it runs on.
#pragma once

#include "engine/base/config.h"
#include "engine/resources.h"

namespace overspill::bindings {

struct PythonConfig : engine::Config, engine::ResourceOptions {};

}  // namespace overspill::bindings
