// What a forward computes: tokens, each at its position of a text.
#pragma once

#include <cstdint>

namespace overspill::inference {

class Cache;

/// A token at its position of a text. Positions of a text that were not computed before lie behind each other
/// in one run of rows.
struct Row {
  int32_t token = 0;
  int64_t position = 0;
  Cache* cache = nullptr;
};

/// Rows of which a forward has the logits at a time.
inline constexpr int64_t kLogitsMax = 32;

}  // namespace overspill::inference
