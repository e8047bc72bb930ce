// The engine (docs/architecture.md): the states of one model's shard, wherever they live, and the step.
//
//   engine.begin_pass({.training = true, .grad_enabled = true});
//   { Lease w = engine.acquire(unit);  compute with w.data(); }
//   engine.add_gradient(unit, segment, gradient, "BF16");
//   engine.step(groups);
//
// Threads. These methods may be called from any thread at any time, also at the same time:
//   acquire() and everything of a Lease, its end included; keep_activation() and everything of an Activation;
//   begin_pass(), begin_backward(), read_part(), add_gradient(), begin_gradient() and everything of a
//   PartedGradient, has_gradient(), generation(), resident_now(), expect_step();
//
//   save_progress(), hurry_save(), device(), layout(), plan(), stats(), report(), report_inside(),
//   report_sum(), figures(), predict(), predict_budgets(), record_journal(), take_journal(),
//   take_device_spans().
//
// All others change or read weights, states or gradients as a whole. The caller calls them one at a time,
// from any thread, and calls none of the methods up to expect_step() above while one of them runs; those
// from device() on may be called even then. The engine adds gradients in the order of the calls: where
// several threads add gradients of one segment, their order decides the last bit of the sum.
//
// "Collective": all ranks make the call, and it waits for them (docs/ranks.md). Errors: std::invalid_argument
// for misuse, BudgetError, io::StoreError, CheckpointError, kernels::DeviceError, EngineFailed after a failed
// update or a replacement of weights that failed halfway; nothing has changed when one of the first five is
// thrown, but for a CheckpointError of load(). After close() the queries (device() to predict_budgets())
// still answer; every other call throws std::invalid_argument, which says that the engine was closed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "engine/activation.h"
#include "engine/base/config.h"
#include "engine/base/device_array.h"
#include "engine/base/engine_failed.h"
#include "engine/base/group_range.h"
#include "engine/base/queue.h"
#include "engine/parted_gradient.h"
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

/// A hold on a unit's weights: while it lives, data() is valid. Move-only; may outlive the engine. Its
/// destructor does not throw: if the device has failed, the engine's next call throws.
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
  /// Work submitted to `queue` from now on, until the lease ends, sees the weights. Their memory stays until
  /// that work is done. Throws kernels::DeviceError.
  void use_on(Queue queue);
  /// Fills `to`, in host memory, with the bytes from `begin` on, and waits for the copy. Throws
  /// std::invalid_argument where the range passes bytes(), kernels::DeviceError.
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

/// Thrown by calls in a forked child of the engine's process: the child has neither the engine's threads nor
/// its memory.
class WrongProcess : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct StepResult {
  int64_t step = 0;        // steps taken so far, this one included
  double norm = 0;         // global, before clipping; infinite where a gradient is inf or NaN
  double clip = 1;         // the factor applied to all gradients
  bool skipped = false;    // inf or NaN in a gradient: nothing was changed
  std::string not_finite;  // skipped: the first segment with inf or NaN; empty: it is on another rank
};

struct SaveProgress {
  bool under_way = false;
  int64_t bytes = 0;
  int64_t done_bytes = 0;
};

struct Stats {
  int64_t step = 0;
  int64_t skipped_steps = 0;
  int64_t host_budget_bytes = 0;
  int64_t host_used_bytes = 0;
  int64_t host_peak_bytes = 0;
  int64_t updates = 0;  // chunks updated by the CPU
  int64_t wait_ns = 0;
  int64_t guesses_taken = 0;       // chunks updated in backward whose update step() used
  int64_t guesses_dropped = 0;     // those whose update step() dropped
  int64_t guesses_unfinished = 0;  // wanted, being made or being written now
  int64_t trace_departures = 0;
  int64_t gathers = 0;  // units whose weights were brought into a block beside their home
  ActivationStats activations;
  int64_t gather_free_run_bytes = 0;  // the longest run of the arena that is free now
  io::StoreStats store;
};

/// Writes the caller's files into `folder`, where a checkpoint is being made, and returns the text that the
/// manifest keeps (Engine::save).
using WriteBeside = std::function<std::string(const std::filesystem::path& folder)>;

class Engine {
 public:
  /// Plans, allocates and reserves space on NVMe. Weights and states are zero until load_weight(),
  /// start_states() or load(). If this throws, the other ranks get the error, too.
  Engine(const std::vector<UnitSpec>& units, const Config& config, Resources resources);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- weights and states from outside; each waits for pending updates
  /// Sets a segment's weights. `dtype` is the unit's, or "F32" for the master (the format 8bit keeps 24 of
  /// its 32 bits). All ranks call it with the same data; each keeps its own shard. After start_states(),
  /// load() or step() the call waits until all ranks have made such a call.
  void load_weight(int32_t unit, int32_t segment, std::span<const std::byte> data, std::string_view dtype);
  /// Collective.
  void read_weight(int32_t unit, int32_t segment, std::span<std::byte> out, std::string_view dtype);
  /// Sets the first states of an optimizer whose states do not start at zero. `groups` as in step().
  void start_states(std::span<const optim::Hyper> groups);
  /// Reads a segment's state by its name in the optimizer ("m", "v", "sum", ...), or its gradient ("grad",
  /// with one rank only), as fp32 values. Collective.
  void read_state(int32_t unit, int32_t segment, std::string_view name, std::span<float> out);
  /// This rank's part of a segment's states: the first element, and how many.
  std::pair<int64_t, int64_t> own_part(int32_t unit, int32_t segment);
  /// read_state() of that part alone. Not collective.
  void read_own_state(int32_t unit, int32_t segment, std::string_view name, std::span<float> out);
  /// Sets a segment's state by its name. Values that read_state() gave are restored bit for bit, others are
  /// rounded to the nearest that the unit's format has. All ranks call it with the same data; each keeps its
  /// own shard.
  void write_state(int32_t unit, int32_t segment, std::string_view name, std::span<const float> values);
  /// How often a segment was updated, which Adam's bias correction depends on. All ranks set the same value.
  int64_t updates_of(int32_t unit, int32_t segment);
  void set_updates_of(int32_t unit, int32_t segment, int64_t updates);

  // ---- forward and backward
  void begin_pass(PassKind kind);
  /// Tells the report when backward begins; without this call the report takes the first gradient.
  void begin_backward();
  Lease acquire(int32_t unit);
  /// A lease for work submitted to `queue` from now on: the queue waits for copies to the device, the caller
  /// does not.
  Lease acquire(int32_t unit, Queue queue);
  bool resident_now(int32_t unit);
  /// Fills `out` with a segment's weights as forward uses them, from element `begin` on, where the unit is
  /// read in parts (UnitSpec::part_bytes); waits for its updates. What follows is read ahead.
  void read_part(int32_t unit, int32_t segment, int64_t begin, std::span<std::byte> out);
  /// Keeps a copy of `bytes`, in host memory, for backward. Nothing where they are none, or more than
  /// Config::activations_bytes: the caller then keeps them itself. Throws io::StoreError where the disks have
  /// no room for what has to leave the arena.
  std::optional<Activation> keep_activation(std::span<const std::byte> bytes);
  /// Makes `data` the segment's weight (lo = 0) after the caller has changed leased memory in place. `data`
  /// is that memory or a copy of it; the lease may be older than the weight. All ranks call it with the same
  /// data, and wait for one another as in load_weight().
  void written(int32_t unit, int32_t segment, std::span<const std::byte> data);
  /// Adds `data`, in host memory, to the segment's gradient of this step.
  void add_gradient(int32_t unit, int32_t segment, std::span<const std::byte> data, std::string_view dtype);
  /// The same for device memory, as the work submitted to `queue` until now leaves it. Returns before the
  /// engine has read it; a failure after that fails the engine.
  void add_gradient(int32_t unit, int32_t segment, DeviceArray gradient, Queue queue);
  /// Adds a gradient that comes in parts, for which nobody has the memory at once. One rank, on the host.
  PartedGradient begin_gradient(int32_t unit, int32_t segment, std::string_view dtype);
  // A call with a `range` concerns the gradients and segments of those groups alone. With several ranks the
  // range must be all groups.
  /// Also forgets the gradients that the last step used. Collective where there are gradients.
  void clear_gradients(GroupRange range = {});
  /// As torch's optimizer.zero_grad(set_to_none=False): present gradients, and those that the last step used,
  /// become zeros, and the next step updates with these. Collective where there are gradients.
  void zero_gradients(GroupRange range = {});
  // What a script does to p.grad in torch. With one rank only. Gradients that clip_grad_norm() has scaled
  // stay scaled.
  /// Replaces the segment's gradient by `data`, or removes it where `data` is empty. Throws as
  /// add_gradient().
  void replace_gradient(int32_t unit, int32_t segment, std::span<const std::byte> data,
                        std::string_view dtype);
  /// Says that the caller has clipped gradients itself: the next step does not apply the configured limit.
  void clipped_by_caller();
  /// Says that gradients are those of a loss multiplied by `scale`, those of the present step too. Norms,
  /// limits and updates are of gradients divided by it; read_gradient() and replace_gradient() move the
  /// scaled values. The scale is 1 until this is called. All ranks must give the same. Throws
  /// std::invalid_argument unless it is positive and finite.
  void set_loss_scale(double scale);
  /// Copies the gradient into `out`, in a dtype of add_gradient(). Throws std::invalid_argument where there
  /// is none.
  void read_gradient(int32_t unit, int32_t segment, std::span<std::byte> out, std::string_view dtype);
  // With any number of ranks, unless gradients are summed on the device.
  /// Reads a segment's gradient as the next step would use it if none were added: the ranks' mean, or their
  /// sum (Config::sum_over_ranks). Collective. False: no rank has one.
  bool read_whole_gradient(int32_t unit, int32_t segment, std::span<float> out);
  /// Replaces that gradient by `values`, the same on all ranks. Collective. False: there is none to replace.
  bool replace_whole_gradient(int32_t unit, int32_t segment, std::span<const float> values);
  /// Reads this rank's own gradient, before it is summed over ranks. At stages 0 and 1.
  bool read_own_gradient(int32_t unit, int32_t segment, std::span<float> out);
  /// Makes the gradients that the last step used present again, unless they were cleared or replaced.
  void reuse_gradients();
  /// Says that the caller made an update itself with the present gradients: they count as used.
  void use_gradients(GroupRange range = {});
  bool has_gradient(int32_t unit, int32_t segment);
  int64_t generation(int32_t unit);

  // ---- the step
  /// With Config::speculate, before the backward pass: the hyper-parameters that the next step() will be
  /// given. If they turn out different, that costs time and never changes a bit.
  void expect_step(std::span<const optim::Hyper> groups);
  /// `groups[i]` has the hyper-parameters of the segments in group range.first + i. A step of a part of the
  /// groups drops guesses, and throws std::invalid_argument where Config::max_grad_norm is set, since that
  /// limits the norm of all gradients. Collective.
  StepResult step(std::span<const optim::Hyper> groups, GroupRange range = {});
  /// Counts a step that the caller skips because a gradient outside the engine is not finite, and throws the
  /// engine's gradients away. With one rank only. Returns a norm of 0 and no name.
  StepResult skip_step(GroupRange range = {});
  /// The global norm of the present gradients, with the scale that clip_grad_norm() gave them. Collective.
  double grad_norm(GroupRange range = {});
  /// As torch's function of this name: scales the present gradients to a norm of `max_norm` at most, and
  /// returns the norm that they had before. The next step applies this scale in place of the configured
  /// limit. Gradients added before that step are added to the scaled ones; with several ranks they throw
  /// std::invalid_argument. With an infinite `max_norm` it scales nothing and returns the norm. Collective.
  double clip_grad_norm(double max_norm);
  /// Returns when all updates are done and written.
  void synchronize();

  // ---- checkpoints: a folder is complete or absent. Collective; the folder is one that all ranks see. It
  // opens at any number of ranks, stage and placement. Where one rank fails or refuses, all do.
  void save(const std::filesystem::path& folder, std::string_view extra_json);
  /// The same with files of the caller's. The engine calls `write_beside` once, on rank 0, when all else is
  /// written, with the folder under its temporary name. It writes durable files, under names that
  /// is_file_of_a_save accepts, and returns the extra_json. If it throws, no checkpoint is made.
  void save(const std::filesystem::path& folder, const WriteBeside& write_beside);
  /// The same, of the states as they are now, while the caller goes on: returns when all that is needed of
  /// them is reserved. Updates that are still to be made belong to it. One at a time: the next save, load()
  /// and close() wait for it and throw its error. Where weights or states are changed from outside, that
  /// waits until they are taken. What lives on the device is taken before this returns. With
  /// Config::train_after_save = false it is save(). Once written() has told of weights that were changed
  /// where they live, all is taken before this returns; a save during which that happens for the first time
  /// fails. Collective.
  void save_in_background(const std::filesystem::path& folder, const WriteBeside& write_beside);
  /// Waits for the last save, and throws its error once. Collective after save_in_background().
  void wait_for_save();
  /// Waits until all states of the last save are taken: to be called before leased weights are changed in
  /// place.
  void wait_for_snapshot();
  /// Copies of the save that is under way no longer leave the disks to others. Any thread.
  void hurry_save() const;
  /// Of the save that is under way, or of the last one; of this rank's part.
  SaveProgress save_progress() const;
  /// Weights, states and step counts of a checkpoint; returns its extra_json. Where a step, load() or a call
  /// that writes weights, states or counts came after start_states(), a damaged checkpoint changes nothing,
  /// since all bytes are compared with their checksums first. Else each byte is read once, and compared on
  /// its way: where one is damaged, load() throws, and until another load() comes through all calls but
  /// load(), close() and those that only look throw CheckpointError.
  std::string load(const std::filesystem::path& folder);

  /// The device whose memory leased weights are in.
  std::shared_ptr<kernels::Device> device() const;
  const Layout& layout() const;
  const Plan& plan() const;
  Stats stats();
  /// Of the last step(), skipped ones included.
  StepReport report();
  /// The same without the time between the previous step() and the next forward.
  StepReport report_inside();
  /// The sum of all reports since the engine was made.
  StepReport report_sum();
  /// The median of the latest steps (telemetry/report.h).
  MachineFigures figures();
  /// What steps take under this plan, and would under other host budgets (plan/predict.h), by those
  /// figures.
  Prediction predict();
  std::vector<BudgetRow> predict_budgets(std::span<const int64_t> budgets);
  void record_journal(bool on);
  std::vector<JournalEntry> take_journal();
  /// What the device did since record_journal(true), timed by its own events. Waits until the device has done
  /// it.
  std::vector<DeviceSpan> take_device_spans();

  /// Names the disks that do not answer, and for how long; empty where all answer. Returns at once, also
  /// while another call hangs or close() runs.
  std::string stall() const;

  /// Finishes what is in flight and gives up the store. Afterwards leases stay valid and the queries still
  /// answer; every other call throws. Until every rank has called close(), or the world has ended, this rank
  /// goes on serving the others. Where the engine or another rank has failed and no call has said so yet,
  /// close() throws EngineFailed, once everything is given up. It waits for a disk that hangs, but no longer
  /// than Config::io_deadline_ms; after that it never frees the buffers that the disk may still write into.
  /// In a forked child this does nothing, and every other call throws WrongProcess. A second call does
  /// nothing. It waits for the thread of the rounds (ranks/rounds.h), so on that thread it throws
  /// std::invalid_argument; the destructor there lets another thread close the engine.
  void close();

 private:
  static std::shared_ptr<Machine> build(const std::vector<UnitSpec>& units, const Config& config,
                                        Resources resources);
  Machine& machine() const;
  Machine& open_machine() const;  // also one that a load has left with parts of two models
  Machine& machine_to_look_at() const;
  enum class Arrived : uint8_t { when_it_is_leased, when_it_is_used };  // on the device
  Lease lease(int32_t unit, Arrived arrived);
  std::shared_ptr<Machine> machine_;
};

}  // namespace overspill::engine
