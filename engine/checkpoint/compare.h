// How the weights of two checkpoints differ.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/checkpoint/manifest.h"

namespace overspill::engine {

/// Of the masters where there are some, else of the weights that forward uses; of integers and F8 only
/// whether they are the same. A difference with a NaN or an infinity in it makes the three numbers not
/// finite.
struct WeightDifference {
  std::string name;
  int64_t elements = 0;
  int64_t differing = 0;    // elements
  double largest = 0;       // |second - first|
  double rms = 0;           // of second - first, over all elements
  double rms_of_first = 0;  // of the weight itself: what `rms` is to be held against
};

/// Compares the parameters that have the same name, shape, memory order and dtype in both checkpoints, in the
/// order of the first. Every byte read is checked against its checksum. Memory: a few MiB. Throws
/// CheckpointError. `progress` as in merge_checkpoint.
std::vector<WeightDifference> compare_weights(const std::filesystem::path& first,
                                              const std::filesystem::path& second,
                                              void (*progress)(void*, int64_t, int64_t), void* context);

}  // namespace overspill::engine
