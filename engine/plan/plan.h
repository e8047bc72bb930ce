// Where components live, and what memory the schedule needs (docs/architecture.md): made once, before
// anything is allocated.
//
// The planner gives the host budget away in this order. (1) The ring, the staging of gradients and the gather
// arena, at their least size; at their best size where that takes a quarter of the budget or less, and not
// all weights fit. (2) Weights: read twice and written once a step, so each byte held saves 3 bytes of
// traffic. (3) Ring and staging at their best size. (4) Gradients in flight: written and read once per
// micro-batch, so each byte held saves 2; the first units come first, since backward gives their gradients
// last. (5) Second weights of guessed updates: each byte held moves 10 bytes of traffic under backward. (6)
// States: each byte held saves 2; the first units of forward come first, since nothing hides their reads. (7)
// Second versions of chunks wholly on the host, of the first units of forward; only beside a device, where
// compute leaves the CPU to the update.
//
// The budget of a device with memory of its own goes to gathered weights first: a weight that stays until
// backward is not copied again (each byte held saves 2 bytes of traffic). What is left when all of them fit
// goes to units that live on the device: their states and gradients stay there, and the device updates them.
// These are the first units of forward, whose updates no compute hides (14 bytes held save 4 bytes of copies
// and 26 of host memory traffic). With several micro-batches the sums of their gradients come before such
// units (4 bytes held save 10 bytes of host memory traffic per micro-batch). With several ranks, where the
// transport reaches the device, each rank keeps its shard there, beside all gathered weights and the memory
// in which gradients are summed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/base/config.h"
#include "engine/collectives/communicator.h"
#include "engine/partition/layout.h"
#include "kernels/device_kernels.h"

namespace overspill::engine {

/// A unit whose update is pending gets room in the gather arena up to so many uses beyond prefetch_units,
/// where the device uses the host's memory: the update then puts the new weights there, and nothing reads
/// them from NVMe.
inline constexpr int64_t kUsesWithUpdates = 64;

/// What the planner has to know of a device.
struct DeviceTraits {
  bool shares_host_memory = true;
  kernels::Formats updates{};  // formats that its kernels update: such units may live on it; may be empty
  bool gathers = false;        // the transport between ranks reaches its memory: shards meet there
};
DeviceTraits traits_of(kernels::Device& device, const Communicator& ranks);

struct Plan {
  std::vector<bool> weights_on_nvme;    // by unit: hi
  std::vector<bool> states_on_nvme;     // by chunk: all components but hi
  std::vector<bool> gradients_on_nvme;  // by chunk: spilled between backward and update; world 1
  std::vector<bool> on_device;          // by unit: this rank's weights, states and gradients live there
  std::vector<bool> summed_on_device;   // by unit: micro-batches' gradients are added up there; world 1
  std::vector<bool> held_twice;         // by chunk, on the host: room for a guessed version of all of it

  /// Parameters that are held alike.
  struct Holding {
    std::string name;        // "adam, exact"
    std::string components;  // with their bytes: "hi 2, lo 2, m 4, v 4"
    int64_t parameters = 0;  // of all ranks
    double parameter_bytes = 0;
  };
  std::vector<Holding> holdings;  // for text()

  /// Bytes of one kind of a unit, by the tier that holds them.
  struct Tiers {
    int64_t device = 0;
    int64_t host = 0;
    int64_t nvme = 0;
  };
  /// A unit, for people. Weights are `hi`; states are all its other components.
  struct UnitHome {
    std::string name;
    int64_t parameters = 0;  // without padding, of all ranks
    bool trainable = true;
    Tiers weights, states;  // of this rank
  };
  std::vector<UnitHome> homes;  // by unit; make_plan fills it in

  // Bytes of this rank.
  int64_t host_budget_bytes = 0;
  int64_t weights_host_bytes = 0;
  int64_t states_host_bytes = 0;
  int64_t gradients_host_bytes = 0;
  int64_t ring_slot_bytes = 0;
  int64_t ring_slots = 0;
  int64_t staging_buffer_bytes = 0;  // gradients on their way to NVMe and back: the largest chunk's,
  int64_t staging_buffers = 0;       // so many times
  int64_t gather_host_bytes =
      0;  // arena of gathered units (where the device shares host memory), or of bounce buffers
  int64_t gather_device_bytes = 0;  // 0 where the device shares host memory
  int64_t units_device_bytes = 0;   // of units that live on the device: weights, states, gradients, scratch
  int64_t accumulators_device_bytes = 0;  // of units that are summed there
  int64_t squares_device_bytes = 0;       // sums of squares of gradients; as much on the host
  int64_t intake_slot_bytes = 0;  // gradients on their way from a device with memory of its own: a chunk's,
  int64_t intake_slots = 0;       // so many times
  int64_t second_weights = 0;     // chunks whose guessed weights have room, of
  int64_t second_weights_bytes = 0;    // bytes each
  int64_t held_twice_bytes = 0;        // guessed versions of chunks wholly on the host
  int64_t access_bytes = 0;            // one component of the largest chunk, for access from outside
  bool gradients_pooled = false;       // several ranks: summed as they come, only this rank's shard is kept
  int64_t gradient_pool_bytes = 0;     // whole gradients of units until then
  int64_t exchange_bytes = 0;          // several ranks: gradients of one chunk as they come from all
  int64_t sums_device_bytes = 0;       // of sums on the device: the pool, where there is one, and what comes,
  int64_t sums_part_bytes = 0;         // of which a part is one rank's, of one chunk
  int64_t activations_host_bytes = 0;  // the arena of what autograd saves
  int64_t serve_bytes = 0;             // several ranks: a shard on its way from NVMe to another rank
  int64_t part_chunk_bytes = 0;        // weights that are read in parts and lie on NVMe: a chunk's,
  int64_t part_chunks = 0;             // so many times
  int64_t weights_nvme_bytes = 0;
  int64_t states_nvme_bytes = 0;
  int64_t gradients_nvme_bytes = 0;
  int64_t nvme_reserve_bytes = 0;
  int64_t nvme_read_bytes_per_step = 0;  // weights: with one forward and one backward pass
  int64_t nvme_written_bytes_per_step = 0;

  int64_t host_bytes() const {
    return weights_host_bytes + states_host_bytes + gradients_host_bytes + ring_slots * ring_slot_bytes +
           staging_buffers * staging_buffer_bytes + gather_host_bytes + intake_slots * intake_slot_bytes +
           second_weights * second_weights_bytes + access_bytes + pool_host_bytes() + exchange_bytes +
           serve_bytes + squares_device_bytes + held_twice_bytes + activations_host_bytes +
           part_chunks * part_chunk_bytes;
  }
  int64_t pool_host_bytes() const { return sums_device_bytes > 0 ? 0 : gradient_pool_bytes; }
  /// Bytes on NVMe that a checkpoint holds.
  int64_t kept_nvme_bytes() const { return weights_nvme_bytes + states_nvme_bytes; }
  int64_t nvme_bytes() const { return kept_nvme_bytes() + gradients_nvme_bytes; }
  int64_t device_bytes() const { return gather_device_bytes + kept_device_bytes(); }
  /// All but gathered weights.
  int64_t kept_device_bytes() const {
    return units_device_bytes + accumulators_device_bytes + squares_device_bytes + sums_device_bytes;
  }
  int64_t units_on_device() const { return std::count(on_device.begin(), on_device.end(), true); }
  /// A table for people.
  std::string text() const;
};

/// Where this rank has its shard of a unit's weights.
enum class WeightPlace : uint8_t {
  host,           // host memory
  whole_on_host,  // host memory of every rank, which has the whole unit: gathered once a step, used in place
  nvme,           // extents of the store
  device,         // a device with memory of its own
};
WeightPlace weight_place(const Layout& layout, const Plan& plan, const DeviceTraits& device, int32_t unit);

/// True where whoever leases the unit gets the weights' own memory; else they are gathered into a block.
bool used_in_place(const Layout& layout, const Plan& plan, const DeviceTraits& device, int32_t unit);

/// How gradients of a trainable unit are held between backward and the update.
enum class GradientRoute : uint8_t {
  whole,     // one array on the host; of several ranks until the step sums them
  by_chunk,  // some chunks are spilled to NVMe
  pooled,    // of several ranks: whole in a pool until they are summed, then this rank's shard by chunk
  device,    // on the device, beside the unit's weights
};
GradientRoute gradient_route(const Layout& layout, const Plan& plan, int32_t unit);

/// True where a unit's weights cannot be used where they lie: they are gathered into a buffer first.
bool needs_gather(const Layout& layout, const DeviceTraits& device, bool weights_on_nvme);

/// True where all shards of a gathered unit meet in host memory, be it on the way to the device. Otherwise
/// each shard goes to the device by itself.
bool meets_on_host(const Layout& layout, const DeviceTraits& device);

/// Bytes of host memory that a gathered unit takes or passes through; 0 where it needs none.
int64_t host_block_bytes(const Layout& layout, const Unit& unit, const DeviceTraits& device,
                         bool weights_on_nvme);

/// True where a unit lies whole on every rank, gathered once a step and used in place (stages 1 and 2).
bool held_whole(const Layout& layout, const DeviceTraits& device, bool weights_on_nvme);

/// The type of a kept gradient's elements, and its bytes: 0 for a frozen unit.
optim::Element gradient_element(optim::Format format, int64_t gradient_accumulation);
int64_t gradient_element_bytes(UnitFormat format, int64_t gradient_accumulation);

/// Bytes on the device of the sum of a unit's gradients over micro-batches; 0 where there is no such sum.
int64_t accumulator_bytes(const Unit& unit, int64_t gradient_accumulation);

/// Whether the device's kernels update such a unit.
bool may_live_on_device(const Unit& unit, const DeviceTraits& device);

/// Whether a chunk's update may be guessed while backward runs: its states are on NVMe, or held twice, and
/// its gradient is in memory.
bool may_guess(const Plan& plan, int32_t chunk);

/// Throws BudgetError, with the sum and the smallest budget that would do, when a budget is too small.
Plan make_plan(const Layout& layout, const Config& config, const DeviceTraits& device);

}  // namespace overspill::engine
