#include "inference/run/lookup.h"

#include <algorithm>

namespace overspill::inference {

std::vector<int32_t> look_up(std::span<const int32_t> text, int64_t most) {
  if (most <= 0) return {};
  for (const size_t length : {size_t{3}, size_t{2}}) {
    if (text.size() <= length) continue;
    const auto last = text.last(length);
    // From the end: what stood there last is likelier to come again.
    for (size_t begin = text.size() - length; begin-- > 0;) {
      if (!std::ranges::equal(text.subspan(begin, length), last)) continue;
      const auto after = text.subspan(begin + length);
      const size_t count = std::min(after.size(), static_cast<size_t>(most));
      return {after.begin(), after.begin() + static_cast<std::ptrdiff_t>(count)};
    }
  }
  return {};
}

}  // namespace overspill::inference
