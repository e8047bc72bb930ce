#include <algorithm>

#include "cpu_optim/piece_check.h"
#include "cpu_optim/update.h"

namespace overspill::optim {
namespace {

// What a worker takes at a time: a few MB of streams, so that the shares even out and taking one costs
// nothing beside it. A multiple of kScaleBlock, so no two workers share a block.
constexpr int64_t kGrain = 256 << 10;
static_assert(kGrain % kScaleBlock == 0);

}  // namespace

void parallel_update(Executor& executor, Format format, const Piece& piece, Gradient gradient,
                     const Factors& factors) {
  // A small piece is cut too, so that every worker has a share.
  const int64_t share = (piece.elements / executor.threads() / kScaleBlock + 1) * kScaleBlock;
  const int64_t grain = std::min(kGrain, share);
  const int64_t slices = (piece.elements + grain - 1) / grain;
  executor.parallel_for(slices, [&](int64_t i) {
    const Range range{i * grain, std::min(piece.elements, (i + 1) * grain)};
    update(format, piece, gradient, range, factors);
  });
}

}  // namespace overspill::optim
