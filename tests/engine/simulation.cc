#include "tests/engine/simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "engine/collectives/self_communicator.h"
#include "engine/memory/budget.h"
#include "kernels/host_device.h"
#include "tests/engine/failing_files.h"
#include "tests/engine/file_calls.h"
#include "tests/engine/simulation_judge.h"
#include "tests/engine/simulation_record.h"
#include "tests/engine/simulation_setup.h"
#include "tests/engine/toy_model.h"
#include "tests/engine/unit_order.h"
#include "tests/engine/virtual_executor.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::Engine;
using engine::Lease;

constexpr int64_t kOperationsLeast = 200;
constexpr int kLivesMost = 4;

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options)
      : options_(options),
        draw_(options.seed),
        draw_of_gradients_(~options.seed),
        setup_(draw_setup(draw_, options.quiet, options.folder.string())),
        record_(result_, options.journal),
        reference_(setup_.units, setup_.config.rounding_seed),
        watched_(files_),
        order_(static_cast<int>(setup_.units.size())) {}

  SimulationResult run() {
    result_.setup = setup_.text(options_.seed);
    try {
      for (int life = 0; !live(life); ++life)
        require(life < kLivesMost, "no life without faults comes to an end");
    } catch (const io::Stalled& stalled) {
      result_.violation = fmt::format("a hang: {}", stalled.what());
    } catch (const std::exception& error) {
      result_.violation = error.what();
    }
    end_life();
    for (const Snapshot& snapshot : snapshots_) fs::remove_all(snapshot.folder);
    return std::move(result_);
  }

 private:
  struct Snapshot {
    fs::path folder;
    ToyReference reference;
    int step;
  };
  /// A lease kept while its unit is updated: the old weights stay.
  struct KeptLease {
    Lease lease;
    std::vector<std::byte> bytes;
  };

  // ---- lives: an engine until the end, or until the disk ends it

  bool live(int life) {
    life_ = life;
    last_saved_.clear();
    make_engine();
    try {
      restore();
      while (step_ < setup_.steps_least || operations() < kOperationsLeast) one_step();
      compare("at the end");
      end_life();
      return true;
    } catch (const engine::EngineFailed& failed) {
      check_failed(failed.what());
    } catch (const io::StoreError& error) {  // of the last comparison
      check_typed(error.error());
      count("store errors from outside the step");
    }
    end_life();
    return false;
  }

  void make_engine() {
    auto time = std::make_shared<io::VirtualTime>();
    io::Faults faults = setup_.faults;
    if (life_ > 0) {  // a better disk
      faults = {.seed = faults.seed + static_cast<uint64_t>(life_), .reorder = faults.reorder};
      faults.delay_max = setup_.faults.delay_max;
    }
    engine::Resources resources;
    resources.device = kernels::make_host_device();
    resources.ranks.communicator = engine::make_self_communicator();
    resources.executor =
        std::make_unique<VirtualExecutor>(time, setup_.threads, setup_.task_us_max, faults.seed);
    auto store = io::make_memory_store(setup_.store_bytes, faults, io::kChecksumBlockBytes, time);
    store_ = store.get();
    one_version_bytes_ = 0;
    if (options_.wrap) {
      resources.store = options_.wrap(std::move(store), time);
    } else {
      resources.store = std::move(store);
    }
    engine_ = std::make_unique<Engine>(setup_.units, setup_.config, std::move(resources));
    guesses_taken_ = guesses_dropped_ = 0;
    engine_->record_journal(options_.journal);
    const auto& spilled = engine_->plan().gradients_on_nvme;
    count("chunks whose gradients are spilled", std::count(spilled.begin(), spilled.end(), true));
    record_.follow(*engine_, *store_);
    record_.note("an engine begins");
  }

  void end_life() {
    if (engine_ == nullptr) return;
    record_.take_journals();
    record_.forget();
    record_.count_faults(store_->fault_counts());
    const io::StoreStats stats = engine_->stats().store;
    transfers_before_ += stats.transfers;
    count("operations: transfers", stats.transfers);
    count("retries", stats.retries);
    count("trace departures", engine_->stats().trace_departures);
    store_ = nullptr;
    held_.clear();
    engine_.reset();
    if (kept_ && result_.violation.empty()) check_kept("after the engine's end");
    kept_.reset();
  }

  void restore() {
    const bool any = !snapshots_.empty();
    while (!snapshots_.empty()) {
      if (load_newest()) return;
    }
    if (any) {  // the last one that was refused may have left parts of it
      end_life();
      make_engine();
    }
    reference_ = ToyReference(setup_.units, setup_.config.rounding_seed);
    step_ = 0;
    toy_load(*engine_);
  }

  /// False where it was refused, and is forgotten.
  bool load_newest() {
    Snapshot& newest = snapshots_.back();
    call("load");
    try {
      engine_->load(newest.folder);
    } catch (const engine::CheckpointError& error) {
      const bool may = setup_.trouble == Trouble::spoilt || setup_.trouble == Trouble::cut;
      require(may, fmt::format("a checkpoint of sound bytes is refused: {}", error.what()));
      count("checkpoints refused");
      fs::remove_all(newest.folder);
      snapshots_.pop_back();
      return false;
    }
    reference_ = newest.reference;
    step_ = newest.step;
    count("checkpoints loaded");
    return true;
  }

  // ---- one step

  void one_step() {
    record_.note(fmt::format("step {}", step_));
    if (draw_.chance(setup_.reorders)) order_.redraw(draw_);
    if (draw_.chance(setup_.evaluates)) evaluate();
    if (step_ % 7 != 3)
      engine_->expect_step(
          toy_groups(step_, setup_.units[0].optimizer));  // else the guess rests on old rates
    const bool infinite = draw_.chance(0.03) && add_infinity_later();
    for (int micro = 0; micro < setup_.config.gradient_accumulation; ++micro) pass(micro);
    if (draw_of_gradients_.chance(0.1)) backward_again();
    if (draw_of_gradients_.chance(0.2)) look_at_gradients();
    if (infinite) add_infinity();
    maybe_keep();
    call("step");
    const engine::StepResult taken = engine_->step(toy_groups(step_, setup_.units[0].optimizer));
    require(taken.skipped == infinite, "a step was skipped, or was not");
    if (!infinite) {
      reference_.advance(step_, micro_batches(), taken.clip, absent_now());
    }
    ++step_;
    count("steps");
    if (draw_of_gradients_.chance(0.3)) {  // as most scripts do; updates that run keep theirs
      call("clear_gradients");
      engine_->clear_gradients();
    }
    const engine::Stats stats = engine_->stats();
    count("guesses taken", stats.guesses_taken - guesses_taken_);
    count("guesses dropped", stats.guesses_dropped - guesses_dropped_);
    guesses_taken_ = stats.guesses_taken;
    guesses_dropped_ = stats.guesses_dropped;
    check_versions();
    look_around();
    record_.take_journals();
  }

  int micro_batches() const { return static_cast<int>(setup_.config.gradient_accumulation); }
  /// Which segments have no gradient in this step.
  ToyReference::Absent absent_now() const {
    return [this](int u, int s, int rank) { return !order_.has(u) || toy_skips(u, s, step_, rank); };
  }

  /// What came so far is thrown away.
  void backward_again() {
    call("clear_gradients");
    engine_->clear_gradients();
    for (int micro = 0; micro < setup_.config.gradient_accumulation; ++micro) pass(micro);
  }

  void look_at_gradients() {
    call("grad");
    check_gradients(*engine_, reference_, step_, micro_batches(), absent_now());
  }

  void look_around() {
    if (draw_.chance(0.1)) assign_weights();
    if (draw_.chance(setup_.saves)) save();
    if (setup_.trouble == Trouble::cut && life_ == 0 && draw_.chance(0.3)) cut();
    if (draw_.chance(setup_.looks)) look();
    if (!snapshots_.empty() && draw_.chance(0.2)) {
      if (!load_newest() && step_ == 0) restore();
    } else if (snapshots_.size() > 1 && draw_.chance(0.3)) {
      fs::remove_all(snapshots_.front().folder);
      snapshots_.erase(snapshots_.begin());
    }
  }

  void pass(int micro) {
    call("begin_pass");
    engine_->begin_pass({true, true});
    held_.clear();
    std::vector<bool> done(setup_.units.size());
    if (!order_.units().empty() && draw_.chance(0.1)) done[add_gradients_early(micro)] = true;
    for (int u : order_.units()) hold(u, acquire(u));
    for (size_t i = order_.units().size(); i-- > 0;) {
      const int u = order_.units()[i];
      Lease lease = acquire(u);
      if (!done[u]) toy_backward(*engine_, lease, u, step_, micro, 0);
      done[u] = true;
      hold(u, std::move(lease));
    }
    held_.clear();
    if (kept_) {
      check_kept("after the next pass");
      kept_.reset();
    }
  }

  /// From somebody who has not acquired the unit since its last update began.
  int add_gradients_early(int micro) {
    const int u = order_.draw_one(draw_);
    const engine::Unit& unit = engine_->layout().units[u];
    for (int s = 0; unit.trainable() && s < static_cast<int>(unit.segments.size()); ++s)
      toy_add_gradient(*engine_, reference_.seen(u, s), u, s, step_, micro, 0);
    return u;
  }

  void hold(int u, Lease lease) {
    if (draw_.chance(0.2)) held_.emplace_back(u, std::move(lease));
    if (held_.size() < 2) return;
    check_seen(held_.front().second, held_.front().first);
    held_.pop_front();
  }

  void evaluate() {
    call("begin_pass");
    engine_->begin_pass({false, false});
    for (int64_t i = draw_.below(6); i > 0; --i) {
      acquire(static_cast<int>(draw_.below(static_cast<int64_t>(setup_.units.size()))));
    }
  }

  Lease acquire(int u) {
    call("acquire");
    Lease lease;
    try {
      lease = engine_->acquire(u);
    } catch (const engine::BudgetError& error) {
      // The arena takes the three largest units: not one more, which is an old version that somebody keeps,
      // nor what that one's place cut in two. With nothing leased there is always room.
      require(kept_ || !held_.empty(), error.what());
      count("acquires refused beside other leases");
      if (kept_) check_kept("before it was given up");
      kept_.reset();
      held_.clear();
      lease = engine_->acquire(u);
    }
    check_seen(lease, u);
    return lease;
  }

  void check_seen(const Lease& lease, int u) const { check_weights(*engine_, lease, u, reference_, step_); }

  bool add_infinity_later() const {
    return std::ranges::any_of(order_.units(),
                               [&](int u) { return setup_.units[u].format == optim::Format::fp32; });
  }
  void add_infinity() {
    for (int u : order_.units()) {
      if (setup_.units[u].format != optim::Format::fp32) continue;
      const auto elements = static_cast<size_t>(engine_->layout().units[u].segments[0].elements);
      const std::vector<float> bad(elements, std::numeric_limits<float>::infinity());
      engine_->add_gradient(u, 0, std::as_bytes(std::span(bad)), "F32");
      return;
    }
  }

  /// Only gathered weights: what is used in place changes under its lease.
  void maybe_keep() {
    const int u = order_.units().empty() ? 0 : order_.draw_one(draw_);
    if (!draw_.chance(0.1) || !engine_->plan().weights_on_nvme[u]) return;
    Lease lease = acquire(u);
    std::vector<std::byte> bytes(lease.data(), lease.data() + lease.bytes());
    kept_ = KeptLease{std::move(lease), std::move(bytes)};
  }
  void check_kept(const char* when) const {
    require(std::memcmp(kept_->lease.data(), kept_->bytes.data(), kept_->bytes.size()) == 0,
            fmt::format("a kept lease changed {}", when));
  }

  // ---- from outside

  void compare(const char* when) {
    call("read");
    check_contents(*engine_, reference_, when);
    check_versions();
    engine_->clear_gradients();  // those that the last step used are no version of anything
    one_version_bytes_ = store_->complete_bytes();
    count("comparisons of everything");
  }

  /// At every instant the store holds one complete version of what it held at rest.
  void check_versions() {
    require(store_->take_least_complete_bytes() >= one_version_bytes_,
            "an old version was given up before the new one was written");
  }

  /// A failing read from outside changes nothing: training goes on.
  void look() {
    try {
      compare("between two steps");
    } catch (const io::StoreError& error) {
      check_typed(error.error());
      count("store errors from outside the step");
    }
  }

  void assign_weights() {
    const auto u = static_cast<int>(draw_.below(static_cast<int64_t>(setup_.units.size())));
    const auto s = static_cast<int>(draw_.below(static_cast<int64_t>(setup_.units[u].segments.size())));
    std::vector<float> weights = reference_.seen(u, s);
    for (float& w : weights) w = w * 0.75F + 1e-3F;
    call("load_weight");
    engine_->load_weight(u, s, std::as_bytes(std::span(weights)), "F32");
    reference_.assign(u, s, weights);
  }

  void cut() {
    engine_->synchronize();
    store_->cut();
    record_.note("cut");
    count("cuts");
  }

  void save() {
    const fs::path folder = options_.folder / fmt::format("checkpoint-{}-{}", life_, ++saves_);
    const bool fails = setup_.trouble == Trouble::files && life_ == 0;
    const int64_t exports_failed = store_->fault_counts().export_errors;
    if (fails) files_.arm(draw_.below(30), setup_.file_errno);
    call("save");
    try {
      engine_->save(folder, "{}");
      count(files_.disarm() ? "saves that got over a file's error" : "saves");
      snapshots_.push_back({folder, reference_, step_});
      last_saved_ = folder;
      return;
    } catch (const engine::EngineFailed&) {
      throw;
    } catch (const io::StoreError& error) {
      require(!error.error().path.empty() && error.error().os_error != 0,
              fmt::format("an error of save names no place: {}", error.what()));
    } catch (const engine::CheckpointError& error) {
      require(std::string(error.what()).find(options_.folder.string()) != std::string::npos,
              fmt::format("an error of save names no place: {}", error.what()));
    }
    const bool struck = files_.disarm();
    require(struck || store_->fault_counts().export_errors > exports_failed, "save failed without a fault");
    require(!fs::exists(folder) && !fs::exists(folder.string() + ".partial"), "a failed save left something");
    count("saves failed");
    if (struck) count("faults: of files");
  }

  // ---- judging failures

  void require_fault(const std::string& what) const {
    require(life_ == 0 && serious(store_->fault_counts()) > 0, what);
  }

  void check_typed(const io::Error& error) const {
    require_fault(fmt::format("an error without a fault: {}", error.message()));
    check_place_and_kind(error, setup_);
  }

  void check_failed(const std::string& what) {
    require_fault(fmt::format("a failure without a fault: {}", what));
    check_told(what, last_saved_);
    check_refuses(*engine_, setup_, options_.folder / "never");
    count("engines failed");
  }

  // ---- counting and noting

  int64_t operations() const {
    return record_.calls() + transfers_before_ + engine_->stats().store.transfers;
  }
  void call(const char* what) { record_.call(what); }
  void count(const std::string& what, int64_t times = 1) { record_.count(what, times); }

  const SimulationOptions options_;
  Draw draw_;
  Draw draw_of_gradients_;  // of its own, so that all else is drawn as it was before there was this
  const SimulationSetup setup_;
  SimulationResult result_;
  SimulationRecord record_;
  FailingFiles files_;
  ToyReference reference_;
  WatchedFiles watched_;
  UnitOrder order_;
  std::vector<Snapshot> snapshots_;
  std::unique_ptr<Engine> engine_;
  int64_t guesses_taken_ = 0;  // by engine_, so far
  int64_t guesses_dropped_ = 0;
  io::MemoryStore* store_ = nullptr;        // the engine's
  std::deque<std::pair<int, Lease>> held_;  // by this pass
  std::optional<KeptLease> kept_;           // over the step
  int64_t one_version_bytes_ = 0;
  int life_ = 0;
  int step_ = 0;
  int saves_ = 0;
  fs::path last_saved_;  // in this life
  int64_t transfers_before_ = 0;
};

}  // namespace

SimulationResult simulate(const SimulationOptions& options) {
  return Simulation(options).run();
}

}  // namespace overspill::testing
