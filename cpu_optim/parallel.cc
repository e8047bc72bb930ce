#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu_optim/executor.h"
#include "cpu_optim/numa.h"
#include "cpu_optim/piece_check.h"
#include "cpu_optim/update.h"

namespace overspill::optim {
namespace {

// What a worker takes at a time: a few MB of streams, so that the shares even out and taking one costs
// nothing beside it. A multiple of kScaleBlock, so no two workers share a block.
constexpr int64_t kGrain = 256 << 10;
static_assert(kGrain % kScaleBlock == 0);

/// The slices of one node, handed out one by one.
struct Queue {
  std::vector<int64_t> slices;
  std::atomic<size_t> next{0};
};

}  // namespace

void parallel_update(Executor& executor, Format format, const Piece& piece, Gradient gradient,
                     const Factors& factors, const Nodes& nodes) {
  const Optimizer optimizer{static_cast<uint8_t>(factors.of.index())};
  check_piece("parallel_update", optimizer, format, piece, {0, piece.elements});
  // A small piece is cut too, so that every worker has a share.
  const int64_t share = (piece.elements / executor.threads() / kScaleBlock + 1) * kScaleBlock;
  const int64_t grain = std::min(kGrain, share);
  const int64_t slices = (piece.elements + grain - 1) / grain;
  const auto update_slice = [&](int64_t i) {
    update(format, piece, gradient, {i * grain, std::min(piece.elements, (i + 1) * grain)}, factors);
  };
  const int count = nodes.count();
  if (count == 1) return executor.parallel_for(slices, update_slice);

  // Each worker starts with the slices whose weights lie on its node, then helps the others.
  std::vector<Queue> queues(static_cast<size_t>(count));
  const int64_t weight_bytes = components(optimizer, format)[0].element_bytes;
  for (int64_t i = 0; i < slices; ++i) {
    const int node = nodes.of(piece.components[0] + i * grain * weight_bytes);
    queues[static_cast<size_t>(node)].slices.push_back(i);
  }
  const int64_t workers = std::min<int64_t>(executor.threads(), slices);
  executor.parallel_for(workers, [&](int64_t worker) {
    const auto home = static_cast<int>(worker % count);
    nodes.run_on(home, [&] {
      for (int turn = 0; turn < count; ++turn) {
        Queue& queue = queues[static_cast<size_t>((home + turn) % count)];
        for (size_t at = queue.next++; at < queue.slices.size(); at = queue.next++)
          update_slice(queue.slices[at]);
      }
    });
  });
}

void parallel_update(Executor& executor, Format format, const Piece& piece, Gradient gradient,
                     const Factors& factors) {
  parallel_update(executor, format, piece, gradient, factors, machine_nodes());
}

}  // namespace overspill::optim
