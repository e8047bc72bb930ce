// The parts of an engine, in the order in which they are built. Beyond engine/ nobody sees this.
#pragma once

#include <atomic>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cpu_optim/optimizer.h"
#include "engine/activations/activation_stash.h"
#include "engine/base/group_range.h"
#include "engine/calls/owners.h"
#include "engine/checkpoint/background_save.h"
#include "engine/checkpoint/keeper.h"
#include "engine/core/queues.h"
#include "engine/device/device_units.h"
#include "engine/engine.h"
#include "engine/gradients/gradient_intake.h"
#include "engine/gradients/gradients.h"
#include "engine/ranks/rounds.h"
#include "engine/states/snapshot.h"
#include "engine/states/updater.h"
#include "engine/weights/access.h"
#include "engine/weights/gather.h"
#include "io/own_process.h"
#include "io/stalls.h"

namespace overspill::engine {

/// As torch.nn.utils.clip_grad_norm_: min(1, limit / (norm + 1e-6)).
double clip_factor(double norm, double limit);

class Machine : public Owners {
 public:
  Machine(Layout layout, Plan plan, Config config, Resources resources);
  ~Machine();

  /// Finishes what is in flight, joins the workers and gives up the store. Afterwards only leases and figures
  /// can be used. A failure that no call has thrown stays in the monitor. A second call returns when the
  /// first has. In a forked child it does nothing.
  void shut_down() noexcept EXCLUDES(engine_mutex);

  // The step (step.cc), as the passes it consists of.
  StepResult step(std::span<const optim::Hyper> groups, GroupRange range) EXCLUDES(engine_mutex);
  StepResult skip_step(GroupRange range) EXCLUDES(engine_mutex);
  void check_groups(std::span<const optim::Hyper> groups, GroupRange range = {}) const;

  /// The global norm: infinite where a gradient is inf. Where one is NaN, it is NaN with one rank, which
  /// takes a pass over all gradients, and infinite with several ranks.
  double norm_of(const GradientSummary& gradient);

  /// Sets this rank's states to what their optimizer starts with, where that is not zero. The updater is
  /// quiescent.
  void start_states(std::span<const optim::Hyper> groups);

  // Checkpoints (save.cc). Collective.
  void save(const std::filesystem::path& folder, const WriteBeside& write_beside) EXCLUDES(engine_mutex);
  /// Returns when the snapshot is marked; the rest is done behind.
  void save_in_background(const std::filesystem::path& folder, const WriteBeside& write_beside)
      EXCLUDES(engine_mutex);
  /// Says that weights of `name` were changed where they live, before anybody could take them for a snapshot:
  /// one that is under way fails, and later ones are taken before save_in_background() returns.
  void forget_snapshot(const std::string& name) REQUIRES(engine_mutex);
  /// Waits for that, if there is one; throws its error, on all ranks.
  void wait_for_save() EXCLUDES(engine_mutex);
  Manifest open(const std::filesystem::path& folder);
  void load_verified(const std::filesystem::path& folder, const Manifest& manifest) EXCLUDES(engine_mutex);
  void load_once(const std::filesystem::path& folder, const Manifest& manifest) EXCLUDES(engine_mutex);

  /// Completes `out`, a segment's elements of `width` bytes each: this rank has filled in its own, the other
  /// ranks send theirs. Collective.
  void share(int32_t unit, int32_t segment, std::span<std::byte> out, int64_t width) EXCLUDES(engine_mutex);
  /// The same; for the thread of the rounds (ranks/rounds.h).
  void exchange_parts(int32_t unit, int32_t segment, std::span<std::byte> out, int64_t width);

  // A segment's gradient of several ranks (whole_gradients.cc); false: there is none.
  bool read_whole_gradient(int32_t unit, int32_t segment, std::span<float> out) EXCLUDES(engine_mutex);
  bool replace_whole_gradient(int32_t unit, int32_t segment, std::span<const float> values)
      EXCLUDES(engine_mutex);
  bool read_own_gradient(int32_t unit, int32_t segment, std::span<float> out) EXCLUDES(engine_mutex);

  /// A rank's part of a segment. Empty: `elements` is 0, and the rest too.
  struct Part {
    int64_t begin = 0;  // in the segment
    int64_t elements = 0;
    int64_t in_shard = 0;

    /// This part of the segment's `content`, which has `width` entries per element.
    template <class T>
    std::span<T> of(std::span<T> content, int64_t width = 1) const {
      return content.subspan(static_cast<size_t>(begin * width), static_cast<size_t>(elements * width));
    }
  };
  Part part_of(int rank, int32_t unit, int32_t segment) const;
  Part own_part(int32_t unit, int32_t segment) const { return part_of(setup.layout.shard, unit, segment); }

  /// Throws CheckpointError, which says so, after a load that met damage on its way, until another has come
  /// through.
  void check_loaded() const;
  /// Throws WrongProcess in a forked child.
  void check_process() const;

  /// The next step clips by the configured limit.
  void forget_clip() {
    clipped.reset();
    caller_clipped = false;
  }

  /// Applies the pending scale of clip_grad_norm() to the present gradients, in place of the next step.
  void settle_clip() EXCLUDES(engine_mutex);

  /// To be called before gradients are thrown away: finishes the intake of all gradients given, and drops
  /// guesses that read them.
  void forget_guesses() EXCLUDES(engine_mutex);

  /// To be called before the weights of these units are replaced, under a Rounds::Change: finishes pending
  /// updates, and gives up gathered copies of the old weights.
  void prepare_to_change(std::span<const int32_t> units) MAY_RELEASE(engine_mutex);

  // Throws std::invalid_argument naming what does not exist.
  const Unit& unit_at(int32_t unit) const;
  const Segment& segment_at(int32_t unit, int32_t segment) const;

  Queues queues;
  GradientSquares squares;
  DeviceUnits device_units;
  Gatherer gatherer;
  Snapshot snapshot;
  Updater updater;
  Gradients gradients;
  GradientIntake intake;
  ActivationStash activations;
  Access access;
  CheckpointKeeper keeper;
  BackgroundSave background;
  Rounds rounds;
  // Written under the engine's mutex; whoever calls step() or load() may read them without it.
  int64_t steps = 0;
  int64_t skipped_steps = 0;
  // Used by calls that the caller makes one at a time (engine.h):
  int64_t looks = 0;                // collective reads and writes of weights or states so far
  bool edits_at_home = false;       // by forget_snapshot()
  bool edits_may_be_saved = false;  // since the last save began: nobody has waited for its snapshot
  bool handed_over = false;         // by start_states(), load() or step(): from now on ranks meet to write
  Mutex settling ACQUIRED_BEFORE(engine_mutex);  // of `clipped`, by whoever brings the next gradient
  std::optional<double> clipped;  // by clip_grad_norm(): the factor of the gradients that are there
  double unscale = 1;             // by set_loss_scale(): what makes gradients those of the loss
  bool caller_clipped = false;    // the present gradients: step() does not apply the configured limit
  std::atomic<bool> closed = false;
  bool touched = true;  // since start_states(): weights or states that a damaged checkpoint would cost
  std::atomic<bool> half_loaded = false;               // by load_once()
  std::string half_loaded_by;                          // written before it
  std::exception_ptr unsaved;                          // by shut_down(): of a save that it waited for
  bool kernel_keeps_memory = false;                    // a hung disk may still write into it: never freed
  const io::OwnProcess process;                        // in its forked children nothing works
  const std::shared_ptr<const io::StallBoard> stalls;  // null without a watch

 private:
  std::vector<std::string> tell(Meeting meeting, const std::exception_ptr& error,
                                const std::string& words = {});
  /// Runs `load`, which replaces all weights and states by those of `folder`; gradients are gone.
  template <class Load>
  void replace_all(const std::filesystem::path& folder, Load load) EXCLUDES(engine_mutex);
  void take_all(RankPart& part) EXCLUDES(engine_mutex);
  void mark(RankPart& part) EXCLUDES(engine_mutex);
  void give_up(const std::filesystem::path& folder, bool prepared) EXCLUDES(engine_mutex);
  Manifest head(std::vector<ManifestUnit> units) const;
  void require_gradients_on_host(int32_t unit);
  /// For each rank, whether it holds gradients of the segment that were not summed yet; then, as the last
  /// entry, how many ranks have a gradient. For the thread of the rounds.
  std::vector<double> holders(int32_t unit, int32_t segment) EXCLUDES(engine_mutex);
  /// Whether the unit's gradients were summed over ranks in this step.
  bool has_sum(int32_t unit) EXCLUDES(engine_mutex);
  std::byte* held_gradient(int32_t unit, int32_t segment, int64_t begin) const;
  /// Calls use(chunk, run, sum, begin in the segment, elements) for each run of this rank's part.
  template <class Use>
  void each_own_sum(int32_t unit, int32_t segment, Use use) const;
  void add_what_ranks_hold(int32_t unit, int32_t segment, std::span<const double> said, std::span<float> out);
  void finish() noexcept EXCLUDES(engine_mutex);
  void finish_updates() EXCLUDES(engine_mutex);
  /// The rest of a step that updates nothing.
  void leave_out() EXCLUDES(engine_mutex);
  GradientSummary reduce_gradients() EXCLUDES(engine_mutex);
  /// Counts the step, and keeps what its updates need.
  void capture_factors(std::span<const optim::Hyper> groups, GroupRange range, double scale)
      EXCLUDES(engine_mutex);
  void schedule_updates() EXCLUDES(engine_mutex);

  std::once_flag shut_down_;
  std::vector<int32_t> scheduled_chunks_;  // of schedule_updates(), kept for their memory
  std::vector<int32_t> changed_units_;
};

}  // namespace overspill::engine
