// How a model is held in memory, and by how many threads it is computed.
#pragma once

#include <cstdint>
#include <optional>

namespace overspill::inference {

/// What matrices become in memory.
enum class WeightFormat : uint8_t {
  as_stored,
  coded,  // bf16 in twelve bits, without loss (kernels/coded.h)
  int8,   // with a scale for each 32 columns of a row, which loses bits (kernels/int8.h)
};

/// What a cache keeps of keys and values.
enum class CacheFormat : uint8_t {
  as_computed,  // bf16, or fp32 where a matrix of the model is
  int8,         // integers from -127 to 127, and a scale for each position of a head; loses bits
};

struct ModelOptions {
  int threads = 1;
  /// Positions computed together, at most: a long prompt goes in so many at a time. More cost memory, about
  /// forty bytes a position and hidden element.
  int64_t rows_max = 128;
  WeightFormat weights = WeightFormat::as_stored;
  CacheFormat cache = CacheFormat::as_computed;
  /// Of memory, for weights, caches and buffers; none: as much as they take. Layers that it does not hold are
  /// read for each pass.
  std::optional<int64_t> budget_bytes{};
  /// With a budget: positions of all texts at a time for which room is kept.
  int64_t positions = 2048;
};

}  // namespace overspill::inference
