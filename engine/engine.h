// The engine (DESIGN 4, 5): the states of one model's shard, wherever they live, and the step.
//
//   engine.begin_pass({.training = true, .grad_enabled = true});
//   { Lease w = engine.acquire(unit);  compute with w.data(); }
//   engine.add_gradient(unit, segment, gradient, "BF16");
//   engine.step(groups);
//
// Threads. These methods may be called from any thread at any time, also at the same time:
//   acquire() and everything of a Lease, its end included; begin_pass(), begin_backward(), add_gradient(),
//   has_gradient(), generation(), resident_now(), expect_step();
//   device(), layout(), plan(), stats(), report(), report_inside(), figures(), predict(), predict_budgets(),
//   record_journal(), take_journal(), take_device_spans().
// All others change or read weights, states or gradients as a whole. The caller calls them one at a time,
// from any thread, and calls none of the methods in the first two lines above while one of them runs; those
// from device() on may be called even then. Gradients are added in the order in which they come: where
// several threads bring gradients of one segment, the threads decide that order, and so the last bit of the
// sum.
//
// Collective means: all ranks make the call, and it waits for them (docs/ranks.md). Errors:
// std::invalid_argument for misuse, BudgetError, io::StoreError, CheckpointError, kernels::DeviceError,
// EngineFailed after a failed update or a replacement of weights that failed halfway; nothing has changed
// when one of the first five is thrown. After close() the queries (device() to predict_budgets()) still
// answer; every other call throws std::invalid_argument, which says that the engine was closed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine/base/config.h"
#include "engine/base/device_array.h"
#include "engine/base/engine_failed.h"
#include "engine/base/group_range.h"
#include "engine/base/queue.h"
#include "engine/telemetry/journal.h"
#include "engine/telemetry/report.h"
#include "engine/weights/trace.h"
#include "io/store_stats.h"
#include "kernels/device.h"

namespace overspill::optim {
struct Hyper;  // cpu_optim/optimizer.h
}

namespace overspill::engine {

struct BudgetRow;       // plan/predict.h
struct Layout;          // partition/layout.h
struct MachineFigures;  // plan/predict.h
struct Plan;            // plan/plan.h
struct Prediction;      // plan/predict.h
struct Resources;       // resources.h
struct UnitSpec;        // partition/model.h
class Machine;          // the parts, alive as long as an engine or a lease is

/// Hold on a unit's gathered weights: while it lives, data() is valid. Move-only; outlives the engine if need
/// be. Its destructor does not throw: where the device has failed, the engine's next call says so.
class Lease {
 public:
  Lease() = default;
  Lease(std::shared_ptr<Machine> machine, struct Block* block, std::byte* data, int64_t bytes)
      : machine_(std::move(machine)), block_(block), data_(data), bytes_(bytes) {}
  Lease(Lease&& other) noexcept { swap(other); }
  Lease& operator=(Lease&& other) noexcept {
    Lease taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~Lease();
  std::byte* data() const { return data_; }  // device memory
  int64_t bytes() const { return bytes_; }
  /// What is submitted to `queue` from now on, until the lease ends, sees the weights, and keeps their memory
  /// until it is done. Throws kernels::DeviceError.
  void use_on(Queue queue);
  /// Copies from byte `begin` on to host memory, whatever the device, and waits for it. Throws
  /// std::invalid_argument beyond bytes(), kernels::DeviceError.
  void copy_to_host(int64_t begin, std::span<std::byte> to) const;

 private:
  void swap(Lease& other) noexcept;
  std::shared_ptr<Machine> machine_;
  struct Block* block_ = nullptr;  // null: the weights are used where they live
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  struct Use {
    Queue queue;
    kernels::Event begin;  // where the journal is on
  };
  std::vector<Use> uses_;
};

/// A call in a forked child of the engine's process, which has none of its threads and not its memory.
class WrongProcess : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct StepResult {
  int64_t step = 0;        // steps taken so far, this one included
  double norm = 0;         // global, before clipping; infinite where a gradient is inf or NaN
  double clip = 1;         // what gradients are multiplied with
  bool skipped = false;    // inf or NaN in a gradient: nothing was changed
  std::string not_finite;  // of a skipped step: its first segment with one; empty: on another rank
};

struct Stats {
  int64_t step = 0;
  int64_t skipped_steps = 0;
  int64_t host_budget_bytes = 0;
  int64_t host_used_bytes = 0;
  int64_t host_peak_bytes = 0;
  int64_t updates = 0;  // of chunks, by the CPU
  int64_t wait_ns = 0;
  int64_t guesses_taken = 0;       // chunks updated in backward
  int64_t guesses_dropped = 0;     // in vain
  int64_t guesses_unfinished = 0;  // wanted, being made or being written now
  int64_t trace_departures = 0;
  int64_t gather_free_run_bytes = 0;  // the longest run of the arena that is free now
  io::StoreStats store;
};

/// Adds files to a checkpoint under way, in the folder that it is given, and returns the text that the
/// manifest keeps (Engine::save).
using WriteBeside = std::function<std::string(const std::filesystem::path& folder)>;

class Engine {
 public:
  /// Plans, allocates, reserves space on NVMe. Weights and states are zero until load_weight(),
  /// start_states(), load(). Where this throws, the other ranks get the error, too.
  Engine(const std::vector<UnitSpec>& units, const Config& config, Resources resources);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- weights and states from outside; each waits for pending updates
  /// A segment's weights: `dtype` is the unit's, or "F32" for the master (8 bits keep 24 of its 32). Sizes
  /// are checked. All ranks do it with the same data, and keep their own shard of it; after start_states(),
  /// load() or step() it begins once all ranks have come to such a call.
  void load_weight(int32_t unit, int32_t segment, std::span<const std::byte> data, std::string_view dtype);
  /// Collective.
  void read_weight(int32_t unit, int32_t segment, std::span<std::byte> out, std::string_view dtype);
  /// States before the first update, of an optimizer that does not start with zero. `groups` as in step().
  void start_states(std::span<const optim::Hyper> groups);
  /// A state of the unit's optimizer by its name ("m", "v", "sum", ...), or "grad", of a segment as fp32
  /// values. Collective; "grad" in a world of one rank only.
  void read_state(int32_t unit, int32_t segment, std::string_view name, std::span<float> out);
  /// This rank's part of a segment's states: the first element, and how many.
  std::pair<int64_t, int64_t> own_part(int32_t unit, int32_t segment);
  /// read_state() of that part alone. Not collective.
  void read_own_state(int32_t unit, int32_t segment, std::string_view name, std::span<float> out);
  /// `values` become a state, by its name, of a segment; what read_state() gave comes back bit for bit, other
  /// values are rounded to the nearest that the unit's format has. All ranks do it with the same data, and
  /// keep their own shard of it.
  void write_state(int32_t unit, int32_t segment, std::string_view name, std::span<const float> values);
  /// How often a segment was updated: Adam's bias correction depends on it. All ranks set it alike.
  int64_t updates_of(int32_t unit, int32_t segment);
  void set_updates_of(int32_t unit, int32_t segment, int64_t updates);

  // ---- forward and backward
  void begin_pass(PassKind kind);
  /// For the report alone: without it backward is taken to begin with the first gradient.
  void begin_backward();
  Lease acquire(int32_t unit);
  /// For what is submitted to `queue` from now on: the caller does not wait for copies to the device.
  Lease acquire(int32_t unit, Queue queue);
  bool resident_now(int32_t unit);
  /// The leased memory of a segment was changed in place: it becomes the weight (lo = 0). `data` is the
  /// segment's new content, the leased memory itself or a copy; the lease may be older than the weight. All
  /// ranks do it alike, and wait for one another as in load_weight().
  void written(int32_t unit, int32_t segment, std::span<const std::byte> data);
  /// `data` is host memory. Adds to what arrived since the last step.
  void add_gradient(int32_t unit, int32_t segment, std::span<const std::byte> data, std::string_view dtype);
  /// Of the device's memory, as what was submitted to `queue` until now leaves it. Returns before it is taken
  /// in; what fails then fails the engine.
  void add_gradient(int32_t unit, int32_t segment, DeviceArray gradient, Queue queue);
  // Calls with a `range` are about the gradients and segments of those groups alone, as if there were no
  // others; in a world of one rank only, unless it is all.
  /// Those that the last step used are forgotten, too. Collective where there are gradients.
  void clear_gradients(GroupRange range = {});
  /// As optimizer.zero_grad(set_to_none=False) of torch: the gradients that are there, and those that the
  /// last step used, become zeros, with which the next step updates. Collective where there are gradients.
  void zero_gradients(GroupRange range = {});
  // As a script does with p.grad, of torch; in a world of one rank only. What clip_grad_norm() has scaled
  // stays scaled.
  /// `data`, in place of the segment's gradient; empty: it has none. Throws as add_gradient().
  void replace_gradient(int32_t unit, int32_t segment, std::span<const std::byte> data,
                        std::string_view dtype);
  /// The caller has clipped gradients itself: the next step leaves the configured limit out, as after
  /// clip_grad_norm().
  void clipped_by_caller();
  /// Into `out`, in the dtypes of add_gradient(). Throws std::invalid_argument where there is none.
  void read_gradient(int32_t unit, int32_t segment, std::span<std::byte> out, std::string_view dtype);
  // Of a world of any size. Not where gradients are summed on the device.
  /// A segment's gradient as the next step would use it, were nothing added: of several ranks their mean, or
  /// sum. Collective. False: no rank has one.
  bool read_whole_gradient(int32_t unit, int32_t segment, std::span<float> out);
  /// `values`, which all ranks give alike, in its place. Collective. False: there is none to replace.
  bool replace_whole_gradient(int32_t unit, int32_t segment, std::span<const float> values);
  /// What this rank's own passes have given, before the ranks' are summed. At stages 0 and 1.
  bool read_own_gradient(int32_t unit, int32_t segment, std::span<float> out);
  /// The gradients that the last step used are there again, unless they were cleared or others came.
  void reuse_gradients();
  /// The gradients that are there were used by an update that the caller made itself.
  void use_gradients(GroupRange range = {});
  bool has_gradient(int32_t unit, int32_t segment);
  int64_t generation(int32_t unit);

  // ---- the step
  /// With Config::speculate: what the next step() will be given. Before the backward pass; a guess that turns
  /// out wrong costs time, never a bit.
  void expect_step(std::span<const optim::Hyper> groups);
  /// `groups[i]` are the hyper-parameters of segments with group i; of a range, with group range.first + i. A
  /// step of a range drops guesses, and throws std::invalid_argument where Config::max_grad_norm is set,
  /// which means all gradients. Collective.
  StepResult step(std::span<const optim::Hyper> groups, GroupRange range = {});
  /// Counts a step that the caller leaves out, for a gradient that is not the engine's: what is here is
  /// thrown away. World 1. Returns a norm of 0 and no name.
  StepResult skip_step(GroupRange range = {});
  /// The global norm of the gradients that are there, with the scale that clip_grad_norm() gave them.
  /// Collective.
  double grad_norm(GroupRange range = {});
  /// As torch's function of this name: scales the gradients that are there now to a norm of `max_norm` at
  /// most, and returns the norm that they had before. The next step applies this scale in place of the
  /// configured limit, or, where further gradients come before it (in a world of one rank only, else
  /// std::invalid_argument), they are added to the scaled ones. An infinite `max_norm` scales nothing: the
  /// call returns the norm only. Collective.
  double clip_grad_norm(double max_norm);
  /// All updates done and written.
  void synchronize();

  // ---- checkpoints: a folder is complete or absent. Collective; the folder is one that all ranks see. It
  // opens at any number of ranks, stage and placement. Where one rank fails or refuses, all do.
  void save(const std::filesystem::path& folder, std::string_view extra_json);
  /// The same with files of the caller's: `write_beside` is called once, on rank 0, when all else is written,
  /// with the folder under its temporary name. What it writes there has to be durable, under a name
  /// that is_file_of_a_save accepts. It returns the extra_json. Where it throws, no checkpoint is there.
  void save(const std::filesystem::path& folder, const WriteBeside& write_beside);
  std::string load(const std::filesystem::path& folder);

  /// Where leased weights are.
  std::shared_ptr<kernels::Device> device() const;
  const Layout& layout() const;
  const Plan& plan() const;
  Stats stats();
  /// Of the last step(), skipped ones included.
  StepReport report();
  /// The same without what passed between the step() before and this one's forward.
  StepReport report_inside();
  /// The median of the latest steps (telemetry/report.h).
  MachineFigures figures();
  /// What steps take under this plan, and would under other host budgets (plan/predict.h), by those
  /// figures.
  Prediction predict();
  std::vector<BudgetRow> predict_budgets(std::span<const int64_t> budgets);
  void record_journal(bool on);
  std::vector<JournalEntry> take_journal();
  /// What the device did since record_journal(true), by its own events. Waits for it.
  std::vector<DeviceSpan> take_device_spans();

  /// Which disks do not answer, and for how long; empty where all answer. Returns at once, also while another
  /// call hangs or the engine is being closed.
  std::string stall() const;

  /// Finishes what is in flight and gives up the store. Afterwards leases stay valid and the looks still
  /// answer; every other call throws. Until every rank has called close(), or the world has ended, this rank
  /// goes on serving the others. Where the engine or another rank has failed and no call has said so yet,
  /// close() throws EngineFailed, once everything is given up. A disk that hangs is waited for, no longer
  /// than Config::io_deadline_ms; the buffers that it may still write into are never freed then. In a forked
  /// child this does nothing, and every other call throws WrongProcess. A second call does nothing.
  /// Throws std::invalid_argument on the thread of the rounds, for whose end it waits; the destructor leaves
  /// the closing to another thread there.
  void close();

 private:
  static std::shared_ptr<Machine> build(const std::vector<UnitSpec>& units, const Config& config,
                                        Resources resources);
  Machine& machine() const;
  Machine& machine_to_look_at() const;
  enum class Arrived : uint8_t { when_it_is_leased, when_it_is_used };  // on the device
  Lease lease(int32_t unit, Arrived arrived);
  std::shared_ptr<Machine> machine_;
};

}  // namespace overspill::engine
