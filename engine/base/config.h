// What the caller decides about an engine. Everything else is planned.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace overspill::engine {

/// Where components live: by budget, or forced (tests, measurements).
enum class Placement : uint8_t {
  automatic,  // as much on the host as its budget takes
  host,       // everything on the host
  half,       // every second unit's weights and every second chunk's states on NVMe
  nvme,       // everything on NVMe
  device,     // units that can live on the device do, as far as its budget goes; the rest on the host
};

struct Config {
  int64_t host_budget_bytes = 0;            // required
  int64_t activations_bytes = 0;            // of them: an arena of activations, which overflows to NVMe
  int64_t device_budget_bytes = 0;          // 0: only the weights that leases and prefetching need
  std::vector<std::filesystem::path> nvme;  // folders
  std::string job = "default";              // names this run's files; one live run per job and folder
  int threads = 0;                          // for updates; 0: one per core
  int64_t prefetch_units = 4;               // 0: nothing is read before it is asked for
  int64_t gradient_accumulation = 1;        // above 1 gradients are kept in fp32
  // The caller promises that all micro-batches pass a unit before the next unit. At stages 2 and 3 the engine
  // then sums the unit's gradient over ranks at once, and never holds all gradients whole. Another order
  // costs further sums.
  bool micro_batches_together = false;
  double max_grad_norm = 0;  // 0: no clipping
  // false: step() updates even with an inf or a NaN in a gradient, as torch's optimizers do.
  bool skip_nonfinite = true;
  bool speculate = false;       // update in backward, before the norm is known; one rank only
  int stage = 3;                // ZeRO stage: what several ranks divide (StagePolicy); never changes a bit
  bool sum_over_ranks = false;  // a step uses the sum of the ranks' gradients, not their mean
  // Several ranks: gradients are summed by the transport's own reduce-scatter, in its order and precision, in
  // place of an exchange and an fp32 sum in rank order. Needs Communicator::reduces().
  bool library_sums = false;
  // Several ranks: units that are wanted at the same time go as one call, up to so many bytes; 0: each alone.
  int64_t bucket_bytes = 1 << 20;
  int64_t rank_timeout_ms =
      30 * 60 * 1000;          // a rank that does nothing for so long while others wait has failed
  int64_t io_deadline_ms = 0;  // a disk that answers nothing for so long fails the engine; 0: never
  int64_t chunk_elements = 512 * 1024;
  Placement placement = Placement::automatic;
  bool poison = false;           // fill freed memory with NaN, so that stale use is loud
  int64_t checkpoints_kept = 1;  // room kept for them on NVMe
  // Checkpoints of runs that have ended: this one goes on in the slabs that they left on its disks
  // (train_after_save only). All that share slabs have to be named.
  std::vector<std::filesystem::path> take_over;
  // false: a checkpoint is taken when training is over. NVMe then has room for one copy of the states, and
  // step() and load() refuse as long as a checkpoint of this run holds it.
  bool train_after_save = true;
  // The largest manifest. A save that needs more is refused when it begins; the start of the run warns of it.
  int64_t manifest_bytes_max = int64_t{1} << 30;
  uint64_t rounding_seed = 0;  // of stochastic rounding (formats compact and 8bit); part of the result
};

}  // namespace overspill::engine
