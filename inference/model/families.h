// The families that are known: from a folder's config.json to the spec of its model.
#pragma once

#include <string>
#include <vector>

#include "inference/format/model_folder.h"
#include "inference/model/spec.h"

namespace overspill::inference {

/// Throws UnknownModel for a model_type that is not in `family_names`, and for a key of config.json that is
/// not known and has a value; ModelError for one that is missing or impossible.
ModelSpec describe(const ModelFolder& folder);

/// The values of model_type that are known.
std::vector<std::string> family_names();

}  // namespace overspill::inference
