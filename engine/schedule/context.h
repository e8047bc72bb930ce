// What the parts of the schedule share: the layout, the plan, the resources, and the state of every unit and
// chunk, under one mutex (engine_mutex.h).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_optim/executor.h"
#include "cpu_optim/optimizer.h"
#include "engine/collectives/communicator.h"
#include "engine/config.h"
#include "engine/engine_failed.h"
#include "engine/memory/budget.h"
#include "engine/memory/host_memory.h"
#include "engine/memory/linked_memory.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"
#include "engine/queues.h"
#include "engine/schedule/engine_mutex.h"
#include "engine/schedule/journal.h"
#include "engine/schedule/report.h"
#include "engine/schedule/trace.h"
#include "io/stall_watch.h"
#include "io/store.h"
#include "kernels/device.h"

namespace overspill::engine {

/// What an engine runs on; its own, but for the device. `store` may be null when the plan puts nothing on
/// NVMe. The transports are shared with whoever builds the engine, who tells the other ranks where it fails.
struct Resources {
  std::shared_ptr<kernels::Device> device;
  std::shared_ptr<Communicator> communicator;  // null once the engine has left its rounds
  /// The ranks that hold the other parts of a model that is divided beside us (tensor, pipeline parallelism),
  /// this one among them; null: we hold all of it. Norms and finiteness of gradients span them; nothing else
  /// does.
  std::shared_ptr<Communicator> model_ranks = nullptr;

  /// Ends the world of the other ranks: this one does not come to what they wait for.
  void abort_ranks(const char* why) const noexcept {
    if (model_ranks != nullptr) model_ranks->abort(why);
    if (communicator != nullptr) communicator->abort(why);
  }
  /// A transport may end together with those of the other ranks, and wait for them.
  void leave_ranks() noexcept {
    model_ranks.reset();
    communicator.reset();
  }
  std::unique_ptr<optim::Executor> executor;
  std::unique_ptr<io::Store> store;
  /// Sees what checkpoints wait for: the store's own, where it has one. Null: nothing does.
  std::shared_ptr<io::StallWatch> watch = nullptr;
};

/// Where a chunk's components are, beyond their homes (the resident arena or the store's extents).
enum class Residency : uint8_t {
  home,      // nowhere else; no ring slot is held
  reading,   // a slot is held, extents -> slot in flight
  staged,    // the slot holds a copy; the extents are valid
  updating,  // a worker rewrites it; chunks wholly on the host pass through this state too, without a slot
  writing,   // the slot holds the new version, its way to new extents is in flight; the old extents are still
             // held
};

/// An update made before step() has decided (schedule/speculation.h).
enum class Guess : uint8_t {
  none,
  wanted,   // may be staged and made
  running,  // a worker makes it
  made,     // the new version is there: its states in the slot or in guessed_extents
  taking,   // a worker brings its weights home
};
enum class Verdict : uint8_t { open, take, drop };

/// What is not guarded are addresses, which stay as the constructor set them; but a guess that is taken
/// exchanges those of `home` and `second`, under the mutex, and none is left where they are reached without
/// it.
struct ChunkState {
  Residency residency GUARDED_BY(engine_mutex) = Residency::home;
  bool pending GUARDED_BY(engine_mutex) = false;  // step() has scheduled an update that has not been done
  int32_t slot GUARDED_BY(engine_mutex) = -1;     // in the ring
  int64_t position GUARDED_BY(engine_mutex) = 0;  // in the order of the update
  std::array<std::byte*, kComponents> home{};     // components on the host
  /// Components on NVMe; empty: never written, all zero.
  std::array<io::Extent, kComponents> extents GUARDED_BY(engine_mutex){};
  std::byte* staged_weights GUARDED_BY(engine_mutex) = nullptr;  // hi in the slot, where hi lives on NVMe
  std::byte* gradient = nullptr;                               // on the host; null: spilled, or there is none
  optim::Element gradient_element GUARDED_BY(engine_mutex){};  // as it is now; constant, but for spilled ones
  io::Extent gradient_extent GUARDED_BY(engine_mutex);         // of a spilled one that was written
  /// Beyond its update, until another comes or it is cleared.
  bool gradient_kept GUARDED_BY(engine_mutex) = false;

  Guess guess GUARDED_BY(engine_mutex) = Guess::none;
  Verdict verdict GUARDED_BY(engine_mutex) = Verdict::open;  // of step(), on a guess
  /// Written; empty until then.
  std::array<io::Extent, kComponents> guessed_extents GUARDED_BY(engine_mutex){};
  std::byte* second_weights GUARDED_BY(engine_mutex) = nullptr;  // guessed hi, where hi lives on the host
  std::array<std::byte*, kComponents> second{};  // of what is held twice: for the guessed version

  /// While `writing`: whether the new version is a guess that is not the chunk's (yet).
  bool writes_a_guess() const REQUIRES(engine_mutex) {
    return guess == Guess::made && verdict != Verdict::take;
  }

  /// The state changes that are allowed; anything else is a bug and throws.
  void become(Residency next) REQUIRES(engine_mutex);
};

/// The gathered form of a unit whose weights cannot be used where they lie.
enum class Gathered : uint8_t {
  absent,      // no memory
  filling,     // block held; this rank's chunks are arriving in it
  local,       // this rank's shard is complete
  collecting,  // the all-gather runs
  ready,       // may be leased
};

struct Block;  // gather.h

/// What is not guarded are addresses, which stay as they were set at first; but that of `gradients` in a pool
/// changes, under the mutex, while nobody brings gradients of the unit or sums them.
struct UnitState {
  Gathered gathered GUARDED_BY(engine_mutex) = Gathered::absent;
  Block* block GUARDED_BY(engine_mutex) = nullptr;
  std::byte* home = nullptr;   // hi of this rank's shard, on the host
  std::byte* whole = nullptr;  // hi of all shards, where the unit lies whole on every rank; home lies in it
  Block* resident = nullptr;   // hi of this rank's shard, where it lives on the device; copied: as it is now
  bool wanted GUARDED_BY(engine_mutex) = false;  // there: gathered as soon as this rank's shard is up to date
  /// The last copy of its weights to the device; it may read `home`.
  kernels::Event copied GUARDED_BY(engine_mutex);
  std::byte* gradients = nullptr;  // all ranks' elements, in flight; null: by chunk, or with one rank there
  int32_t pending_chunks GUARDED_BY(engine_mutex) = 0;
  int64_t generation GUARDED_BY(engine_mutex) = 0;  // of the weights
  // Captured by step(), by segment:
  std::vector<optim::Factors> factors GUARDED_BY(engine_mutex);
  std::vector<uint8_t> updated GUARDED_BY(engine_mutex);  // has a gradient in this step
  std::vector<int64_t> steps GUARDED_BY(engine_mutex);    // updates so far
  // Captured when the unit's gradients seemed final, by segment:
  std::vector<optim::Factors> guessed_factors GUARDED_BY(engine_mutex);
  std::vector<uint8_t> guessed GUARDED_BY(engine_mutex);  // has a gradient
};

struct ScheduleStats {
  int64_t updates = 0;  // chunks
  int64_t guesses_taken = 0;
  int64_t guesses_dropped = 0;
  int64_t wait_ns = 0;  // callers waited for weights or updates
};

int64_t now_ns();

/// Context::failure of an engine that was closed and had not failed.
inline constexpr std::string_view kClosed = "the engine was closed";

struct Context {
  Context(Layout layout, Plan plan, Config config, Resources resources);

  bool on_nvme(int32_t chunk, Component component) const {
    return component == Component::hi ? plan.weights_on_nvme[layout.chunks[chunk].unit]
                                      : plan.states_on_nvme[chunk];
  }
  /// The chunk has such a component, and it lives in extents.
  bool in_store(int32_t chunk, Component component) const {
    return on_nvme(chunk, component) && component_bytes(chunk, component) > 0;
  }
  bool touches_nvme(int32_t chunk) const {
    return plan.weights_on_nvme[layout.chunks[chunk].unit] || plan.states_on_nvme[chunk] ||
           plan.gradients_on_nvme[chunk];
  }
  /// Of the gradients that a trainable unit holds; gradient_width: bytes an element, 0 where it is frozen.
  optim::Element gradient_type(int32_t unit) const {
    return gradient_element(*layout.units[unit].format, config.gradient_accumulation);
  }
  int64_t gradient_width(int32_t unit) const {
    return gradient_element_bytes(layout.units[unit].format, config.gradient_accumulation);
  }
  /// At most: a spilled one may be narrower.
  int64_t gradient_bytes(int32_t chunk) const {
    const Chunk& c = layout.chunks[chunk];
    return c.elements * gradient_width(c.unit);
  }
  int64_t component_bytes(int32_t chunk, Component component) const {
    const Chunk& c = layout.chunks[chunk];
    return layout.units[c.unit].component_bytes(component, c.elements);
  }
  /// Of the unit's stochastic rounding: by the unit's place in the model and what the user gave, nothing
  /// else.
  uint64_t rounding_seed(int32_t unit) const {
    return config.rounding_seed * 1'000'003 + static_cast<uint64_t>(unit);
  }
  bool used_in_place(int32_t unit) const {
    const bool there = plan.on_device[unit] && layout.slices == 1;
    return there || !needs_gather(layout, traits, plan.weights_on_nvme[unit]);
  }
  bool held_whole(int32_t unit) const {
    return engine::held_whole(layout, traits, plan.weights_on_nvme[unit]);
  }
  kernels::Device& device() const { return *resources.device; }
  io::Store& store() const { return *resources.store; }
  io::StallWatch* watch() const { return resources.watch.get(); }

  /// First failure wins; wakes everyone.
  void fail(const std::string& cause) REQUIRES(engine_mutex);
  /// Throws EngineFailed after a failure: its caller is told; std::invalid_argument once the engine is
  /// closed.
  void check() REQUIRES(engine_mutex);
  /// The one mutex, which annotations call engine_mutex.
  Mutex& mutex() RETURN_CAPABILITY(engine_mutex) { return mutex_; }

  /// Waits for `done`, counting the time; throws EngineFailed when the engine fails meanwhile. `unit`: what
  /// for.
  template <class Done>
  void wait(Done done, Cause cause, int32_t unit = -1) MAY_RELEASE(engine_mutex);
  /// As Store::poll, without the mutex. False without a store.
  bool poll() MAY_RELEASE(engine_mutex);
  /// Keeps the store where a caller goes to it by itself, without the mutex: take_store() waits for the end
  /// of it. Throws as check() does, so nobody goes to a store that is given up.
  class StoreKept {
   public:
    explicit StoreKept(Context& context) EXCLUDES(engine_mutex);
    ~StoreKept() EXCLUDES(engine_mutex);
    StoreKept(const StoreKept&) = delete;
    StoreKept& operator=(const StoreKept&) = delete;

   private:
    Context& context_;
  };
  /// Takes the store, once nobody is in poll() or allocate() any more, and no StoreKept is left. Nothing new
  /// may be started.
  std::unique_ptr<io::Store> take_store() MAY_RELEASE(engine_mutex);

  /// The unit's updates come before others, until they are done.
  void demand(int32_t unit) REQUIRES(engine_mutex);
  void end_demand(int32_t unit) REQUIRES(engine_mutex) { std::erase(demanded_units, unit); }

  /// As Store::allocate, without the mutex, since it may wait for the disk. Throws StoreError.
  io::Extent allocate(int64_t bytes) MAY_RELEASE(engine_mutex);
  /// Waits for the device, without the mutex. Throws kernels::DeviceError.
  void wait_for(const kernels::Event& event) MAY_RELEASE(engine_mutex);
  /// Hands a transfer of the schedule to the store; the report counts it until its on_complete says so.
  void submit(io::Transfer& transfer) REQUIRES(engine_mutex);
  void completed(const io::Transfer& transfer) REQUIRES(engine_mutex);

  /// Where a component on NVMe is now; empty: it was never written.
  io::Extent extent_of(int32_t chunk, Component component) EXCLUDES(engine_mutex);

  /// Gives up what is on NVMe of a chunk's gradient, if anything is.
  void release_gradient(ChunkState& state) REQUIRES(engine_mutex);

  const Layout layout;
  const Plan plan;
  const Config config;
  Resources resources;
  const DeviceTraits traits;
  const int workers;  // of the executor, which close() gives up
  Budget host_budget;
  LinkedMemory linked;  // weights and gradients on the host: they come from a device, or go there
  HostMemory states;    // on the host
  HostMemory second;    // versions of what is held twice

  Condition changed;               // of what the mutex guards
  std::vector<UnitState> units;    // as many as long as the engine lives; their members say what guards them
  std::vector<ChunkState> chunks;  // the same
  Queues queues;
  Trace trace GUARDED_BY(engine_mutex);
  ScheduleStats stats GUARDED_BY(engine_mutex);
  std::string failure GUARDED_BY(engine_mutex);
  std::string cause GUARDED_BY(engine_mutex);  // of it, alone
  bool told GUARDED_BY(engine_mutex) = false;  // a caller has been given it
  std::string last_checkpoint GUARDED_BY(engine_mutex);
  int at_store GUARDED_BY(engine_mutex) = 0;  // callers who are in the store without the mutex
  /// Somebody waits for their updates; the latest comes first.
  std::vector<int32_t> demanded_units GUARDED_BY(engine_mutex);
  /// Callers wait for their gathered weights; the oldest comes first.
  std::vector<int32_t> awaited_units GUARDED_BY(engine_mutex);
  uint64_t progress GUARDED_BY(engine_mutex) = 0;  // calls so far
  Journal journal GUARDED_BY(engine_mutex);
  StepMeter meter GUARDED_BY(engine_mutex);

 private:
  class AtStore;
  void leave_store() REQUIRES(engine_mutex);
  template <class Carver>
  void carve_gradients(const Unit& unit, UnitState& state,
                       Carver& carver) NO_THREAD_SAFETY_ANALYSIS;  // of the constructor: nobody else is here

  Mutex mutex_;
};

template <class Done>
void Context::wait(Done done, Cause cause, int32_t unit) {
  check();
  if (done()) return;
  const int64_t start = now_ns();
  journal.note(Happening::waiting, unit);
  meter.begin(Activity::wait);
  const auto over = [&]() REQUIRES(engine_mutex) { return !failure.empty() || done(); };
  while (!over() && poll()) {
  }
  while (!over()) changed.wait(mutex());
  journal.note(Happening::resumed, unit);
  meter.end(Activity::wait);
  const int64_t waited_ns = now_ns() - start;
  stats.wait_ns += waited_ns;
  meter.waited(cause, waited_ns);
  check();
}

}  // namespace overspill::engine
