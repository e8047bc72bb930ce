#include "engine/collectives/rank_order_sum.h"

#include <algorithm>

namespace overspill::engine {

void sum_in_rank_order(Communicator& ranks, std::span<double> values, std::vector<double>& scratch) {
  const size_t count = values.size();
  const auto world = static_cast<size_t>(ranks.world());
  scratch.resize(world * count);
  std::ranges::copy(values, scratch.begin() + static_cast<std::ptrdiff_t>(ranks.rank() * count));
  ranks.all_gather(std::as_writable_bytes(std::span(scratch)));
  std::copy_n(scratch.begin(), count, values.begin());  // not added to 0.0, which would turn -0.0 into 0.0
  for (size_t rank = 1; rank < world; ++rank) {
    for (size_t i = 0; i < count; ++i) values[i] += scratch[rank * count + i];
  }
}

}  // namespace overspill::engine
