// Frequencies of rotary embeddings as config.json describes them.
#pragma once

#include <cstdint>

#include "inference/model/config.h"
#include "inference/model/spec.h"

namespace overspill::inference {

/// Takes `rope_parameters` or, as before transformers 5, `rope_theta`, `rope_scaling` and
/// `partial_rotary_factor`. Without a theta it is `theta`. Types: default, linear, llama3; another one is an
/// UnknownModel.
Rope take_rope(Config& config, int64_t head_size, double theta);

/// The same for one object of `rope_parameters` or `rope_scaling`, which is taken to its end.
Rope rope_of(Config parameters, int64_t head_size, double theta, double partial_factor);

}  // namespace overspill::inference
