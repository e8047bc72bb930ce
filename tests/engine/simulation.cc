#include "tests/engine/simulation.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "engine/collectives/self_communicator.h"
#include "engine/memory/budget.h"
#include "kernels/host_device.h"
#include "tests/engine/file_calls.h"
#include "tests/engine/simulation_setup.h"
#include "tests/engine/toy_model.h"
#include "tests/engine/virtual_executor.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;
using engine::Engine;
using engine::Lease;

constexpr int64_t kOperationsLeast = 200;
constexpr int kLivesMost = 4;

class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void require(bool holds, const std::string& what) {
  if (!holds) throw Violation(what);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Fails one call of a save.
class FailingFiles : public FileWatcher {
 public:
  void arm(int64_t calls_before, int os_error) {
    left_ = calls_before;
    os_error_ = os_error;
  }
  /// Whether it has failed one since.
  bool disarm() { return std::exchange(left_, -1) == -2; }
  bool syncs() const override { return false; }
  int failure_of(const FileCall& call) override {
    if (left_ < 0 || removes(call)) return 0;
    if (left_-- > 0) return 0;
    left_ = -2;
    return os_error_;
  }

 private:
  /// What a failed save has made goes away only if these succeed.
  static bool removes(const FileCall& call) {
    if (call.kind == FileCall::Kind::close || call.kind == FileCall::Kind::remove) return true;
    const bool looks_into = (call.flags & O_DIRECTORY) != 0 &&
                            ((call.flags & (O_PATH | O_NOFOLLOW)) != 0 || call.path.ends_with("/."));
    return call.kind == FileCall::Kind::open && looks_into;
  }

  int64_t left_ = -1;
  int os_error_ = 0;
};

int64_t serious(const io::FaultCounts& f) {
  return f.read_errors + f.write_errors + f.bit_flips + f.bit_flips_at_rest + f.lost_writes +
         f.misdirected_writes + f.misdirected_reads + f.dropped + f.torn;
}

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options)
      : options_(options),
        draw_(options.seed),
        draw_of_gradients_(~options.seed),
        setup_(draw_setup(draw_, options.quiet, options.folder.string())),
        reference_(setup_.units, setup_.config.rounding_seed),
        watched_(files_) {
    order_.resize(setup_.units.size());
    std::iota(order_.begin(), order_.end(), 0);
  }

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
    answers_noted_ = 0;
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
    note("an engine begins");
  }

  void end_life() {
    if (engine_ == nullptr) return;
    take_journals();
    add(store_->fault_counts());
    const io::StoreStats stats = engine_->stats().store;
    transfers_before_ += stats.transfers;
    result_.counts["operations: transfers"] += stats.transfers;
    result_.counts["retries"] += stats.retries;
    result_.counts["trace departures"] += engine_->stats().trace_departures;
    store_ = nullptr;
    held_.clear();
    engine_.reset();
    if (kept_ && result_.violation.empty()) check_kept("after the engine's end");
    kept_.reset();
  }

  void restore() {
    while (!snapshots_.empty()) {
      if (load_newest()) return;
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
    note(fmt::format("step {}", step_));
    if (draw_.chance(setup_.reorders)) draw_order();
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
      reference_.advance(step_, micro_batches(), taken.clip,
                         [&](int u, int s, int rank) { return absent(u, s, rank); });
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
    take_journals();
  }

  int micro_batches() const { return static_cast<int>(setup_.config.gradient_accumulation); }
  bool absent(int u, int s, int rank) const {
    return std::find(order_.begin(), order_.end(), u) == order_.end() || toy_skips(u, s, step_, rank);
  }

  /// What came so far is thrown away.
  void backward_again() {
    call("clear_gradients");
    engine_->clear_gradients();
    for (int micro = 0; micro < setup_.config.gradient_accumulation; ++micro) pass(micro);
  }

  void look_at_gradients() {
    call("grad");
    for (size_t u = 0; u < setup_.units.size(); ++u) {
      const auto ui = static_cast<int>(u);
      const engine::Unit& unit = engine_->layout().units[u];
      for (int s = 0; unit.trainable() && s < static_cast<int>(unit.segments.size()); ++s) {
        require(engine_->has_gradient(ui, s) != absent(ui, s, 0), "a gradient is there, or is not");
        if (absent(ui, s, 0)) continue;
        std::vector<float> got(static_cast<size_t>(unit.segments[s].elements));
        engine_->read_state(ui, s, "grad", got);
        const auto expected =
            reference_.gradient(ui, s, step_, micro_batches(), [&](int, int, int) { return false; });
        require(same_bits(got, expected), fmt::format("a gradient differs: {}", unit.segments[s].name));
      }
    }
  }

  void look_around() {
    if (draw_.chance(0.1)) assign_weights();
    if (draw_.chance(setup_.saves)) save();
    if (setup_.trouble == Trouble::cut && life_ == 0 && draw_.chance(0.3)) cut();
    if (draw_.chance(setup_.looks)) look();
    if (!snapshots_.empty() && draw_.chance(0.2)) {
      load_newest();
    } else if (snapshots_.size() > 1 && draw_.chance(0.3)) {
      fs::remove_all(snapshots_.front().folder);
      snapshots_.erase(snapshots_.begin());
    }
  }

  /// Units that are left out, used again, in another order: the trace departs.
  void draw_order() {
    order_.clear();
    for (int u = 0; u < static_cast<int>(setup_.units.size()); ++u) {
      if (draw_.chance(0.9)) order_.push_back(u);
      if (draw_.chance(0.1)) order_.push_back(u);
    }
    for (size_t i = order_.size(); i > 1; --i)
      std::swap(order_[i - 1], order_[draw_.below(static_cast<int64_t>(i))]);
  }

  void pass(int micro) {
    call("begin_pass");
    engine_->begin_pass({true, true});
    held_.clear();
    std::vector<bool> done(setup_.units.size());
    if (!order_.empty() && draw_.chance(0.1)) done[add_gradients_early(micro)] = true;
    for (int u : order_) hold(u, acquire(u));
    for (size_t i = order_.size(); i-- > 0;) {
      const int u = order_[i];
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
    const int u = order_[draw_.below(static_cast<int64_t>(order_.size()))];
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

  void check_seen(const Lease& lease, int u) {
    for (int s = 0; s < static_cast<int>(setup_.units[u].segments.size()); ++s) {
      require(
          same_bits(toy_leased(*engine_, lease, u, s), reference_.seen(u, s)),
          fmt::format("forward sees wrong weights: {} in step {}", setup_.units[u].segments[s].name, step_));
    }
  }

  bool add_infinity_later() const {
    return std::any_of(order_.begin(), order_.end(),
                       [&](int u) { return setup_.units[u].format == optim::Format::fp32; });
  }
  void add_infinity() {
    for (int u : order_) {
      if (setup_.units[u].format != optim::Format::fp32) continue;
      const auto elements = static_cast<size_t>(engine_->layout().units[u].segments[0].elements);
      const std::vector<float> bad(elements, std::numeric_limits<float>::infinity());
      engine_->add_gradient(u, 0, std::as_bytes(std::span(bad)), "F32");
      return;
    }
  }

  /// Only gathered weights: what is used in place changes under its lease.
  void maybe_keep() {
    const int u = order_.empty() ? 0 : order_[draw_.below(static_cast<int64_t>(order_.size()))];
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
    require(same_bits(toy_contents(*engine_), reference_.contents()),
            fmt::format("weights or moments differ from the reference {}", when));
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
    note("cut");
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

  void check_typed(const io::Error& error) const {
    require(life_ == 0 && serious(store_->fault_counts()) > 0,
            fmt::format("an error without a fault: {}", error.message()));
    require(error.path == "memory" && error.length_bytes > 0,
            fmt::format("an error names no place: {}", error.message()));
    const bool expected = setup_.trouble == Trouble::errors
                              ? error.kind == io::kind_of_errno(setup_.faults.read_errno) ||
                                    error.kind == io::kind_of_errno(setup_.faults.write_errno)
                              : error.kind == io::ErrorKind::corrupt;
    require(expected, fmt::format("an error of another kind than its fault: {}", error.message()));
  }

  void check_failed(const std::string& what) {
    require(life_ == 0 && serious(store_->fault_counts()) > 0,
            fmt::format("a failure without a fault: {}", what));
    for (const char* part : {"store: ", " failed: ", "memory at offset ", " bytes"}) {
      require(what.find(part) != std::string::npos, fmt::format("'{}' is missing in: {}", part, what));
    }
    const std::string last = last_saved_.empty() ? "No checkpoint was saved in this run"
                                                 : "The last complete checkpoint is " + last_saved_.string();
    require(what.find(last) != std::string::npos, fmt::format("'{}' is missing in: {}", last, what));
    refuses("acquire", [&] { engine_->acquire(0); });
    refuses("begin_pass", [&] { engine_->begin_pass({true, true}); });
    refuses("step", [&] { engine_->step(toy_groups(0, setup_.units[0].optimizer)); });
    refuses("save", [&] { engine_->save(options_.folder / "never", "{}"); });
    refuses("read", [&] { toy_contents(*engine_); });
    count("engines failed");
  }

  template <class Call>
  void refuses(const char* what, Call&& try_it) {
    try {
      try_it();
    } catch (const engine::EngineFailed&) {
      return;
    }
    throw Violation(fmt::format("a failed engine still does {}", what));
  }

  // ---- counting and noting

  int64_t operations() const { return calls_ + transfers_before_ + engine_->stats().store.transfers; }

  void call(const char* what) {
    ++calls_;
    count(fmt::format("operations: {}", what));
    note(what);
  }
  void count(const std::string& what, int64_t times = 1) { result_.counts[what] += times; }

  void add(const io::FaultCounts& f) {
    const std::pair<const char*, int64_t> all[] = {{"delays", f.delayed},
                                                   {"reorderings", f.reordered},
                                                   {"short transfers", f.short_transfers},
                                                   {"EINTR or EAGAIN", f.interrupted},
                                                   {"errors that pass", f.passing_errors},
                                                   {"errno on read", f.read_errors},
                                                   {"errno on write", f.write_errors},
                                                   {"bit flips on read", f.bit_flips},
                                                   {"bit flips at rest", f.bit_flips_at_rest},
                                                   {"lost writes", f.lost_writes},
                                                   {"misdirected writes", f.misdirected_writes},
                                                   {"misdirected reads", f.misdirected_reads},
                                                   {"exports failed", f.export_errors},
                                                   {"unsynced writes dropped at a cut", f.dropped},
                                                   {"writes torn at a cut", f.torn}};
    for (const auto& [name, times] : all) result_.counts[fmt::format("faults: {}", name)] += times;
  }

  void note(std::string_view what) {
    if (!options_.journal) return;
    take_journals();
    result_.journal += fmt::format("{}\n", what);
  }

  void take_journals() {
    if (!options_.journal || engine_ == nullptr) return;
    for (const engine::JournalEntry& e : engine_->take_journal()) {
      result_.journal += fmt::format("  {} unit {} chunk {} slot {}\n", engine::happening_name(e.happening),
                                     e.unit, e.chunk, e.slot);
    }
    const auto& answers = store_->answers();
    for (; answers_noted_ < answers.size(); ++answers_noted_) {
      const io::Answer& a = answers[answers_noted_];
      result_.journal += fmt::format("  {} us: {} at {}, {} bytes: {} {}\n", a.time_us,
                                     a.writes ? "write" : "read", a.offset, a.asked_bytes, a.result, a.fault);
    }
  }

  const SimulationOptions options_;
  Draw draw_;
  Draw draw_of_gradients_;  // of its own, so that all else is drawn as it was before there was this
  const SimulationSetup setup_;
  SimulationResult result_;
  FailingFiles files_;
  ToyReference reference_;
  WatchedFiles watched_;
  std::vector<int> order_;
  std::vector<Snapshot> snapshots_;
  std::unique_ptr<Engine> engine_;
  int64_t guesses_taken_ = 0;  // by engine_, so far
  int64_t guesses_dropped_ = 0;
  io::MemoryStore* store_ = nullptr;        // the engine's
  std::deque<std::pair<int, Lease>> held_;  // by this pass
  std::optional<KeptLease> kept_;           // over the step
  size_t answers_noted_ = 0;
  int64_t one_version_bytes_ = 0;
  int life_ = 0;
  int step_ = 0;
  int saves_ = 0;
  fs::path last_saved_;  // in this life
  int64_t calls_ = 0;
  int64_t transfers_before_ = 0;
};

}  // namespace

SimulationResult simulate(const SimulationOptions& options) {
  return Simulation(options).run();
}

}  // namespace overspill::testing
