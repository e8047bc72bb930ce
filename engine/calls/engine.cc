#include "engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu_optim/optimizer.h"
#include "engine/calls/calls.h"
#include "engine/calls/machine.h"
#include "io/kept.h"
#include "io/say.h"

namespace overspill::engine {
namespace {

Config checked(Config config) {
  if (config.host_budget_bytes <= 0) throw std::invalid_argument("host_budget_bytes must be positive");
  if (config.activations_bytes < 0) throw std::invalid_argument("activations_bytes must not be negative");
  if (config.threads < 0) throw std::invalid_argument("threads must not be negative");
  if (config.prefetch_units < 0) throw std::invalid_argument("prefetch_units must not be negative");
  if (config.bucket_bytes < 0) throw std::invalid_argument("bucket_bytes must not be negative");
  if (config.gradient_accumulation < 1)
    throw std::invalid_argument("gradient_accumulation must be at least 1");
  if (!(config.max_grad_norm >= 0)) throw std::invalid_argument("max_grad_norm must not be negative");
  if (config.io_deadline_ms < 0) throw std::invalid_argument("io_deadline_ms must not be negative");
  if (config.checkpoints_kept < 0) throw std::invalid_argument("checkpoints_kept must not be negative");
  return config;
}

/// A forked child leaves the machine as it is, because nobody there will release the locks that the parent's
/// threads held. Buffers that a disk may still write into are kept, with a word on stderr.
void dispose(Machine* machine) noexcept {
  if (!machine->process.here()) return;
  machine->shut_down();
  std::shared_ptr<Machine> last(machine);
  if (!machine->kernel_keeps_memory) return;
  io::say_on_stderr(fmt::format(
      "overspill: {} bytes of buffers stay allocated until this process ends: a disk that does not "
      "answer may still write into them",
      machine->hardware.host_budget.used_bytes()));
  io::keep_for_ever(std::move(last));
}

/// For a caller on a thread of the engine's own, who cannot wait for that thread's end.
void shut_down_elsewhere(std::shared_ptr<Machine> machine) noexcept {
  try {
    std::thread([machine] { machine->shut_down(); }).detach();
  } catch (const std::system_error& error) {
    machine->rounds.abort("its engine was destroyed on the thread of its rounds");
    io::say_on_stderr(fmt::format(
        "overspill: an engine stays until this process ends: it was destroyed on the thread of its "
        "rounds, and there is no other to close it ({})",
        error.what()));
    io::keep_for_ever(std::move(machine));
  }
}

}  // namespace

// ---- the engine

Engine::Engine(const std::vector<UnitSpec>& units, const Config& config, Resources resources) {
  const RankGroups ranks = resources.ranks;
  try {
    machine_ = build(units, config, std::move(resources));
  } catch (const std::exception& error) {
    ranks.abort(error.what());  // else the other ranks would wait for an engine that was never built
    throw;
  }
}

std::shared_ptr<Machine> Engine::build(const std::vector<UnitSpec>& units, const Config& config,
                                       Resources resources) {
  Config own = checked(config);
  if (resources.device == nullptr || resources.ranks.communicator == nullptr ||
      resources.executor == nullptr) {
    throw std::invalid_argument("an engine needs a device, a communicator and an executor");
  }
  const Communicator& ranks = *resources.ranks.communicator;
  if (own.speculate && ranks.world() > 1) {
    throw std::invalid_argument(
        fmt::format("speculate needs a world of one rank; this one has {}", ranks.world()));
  }
  if (own.library_sums && ranks.world() > 1 && !ranks.reduces()) {
    throw std::invalid_argument(
        "library_sums: this transport has no reduction of its own (MPI and NCCL have); leave it out");
  }
  if (std::ranges::any_of(units, [](const UnitSpec& unit) { return unit.part_bytes != 0; }) &&
      (ranks.world() > 1 || !resources.device->shares_host_memory())) {
    throw std::invalid_argument(
        "weights are read in parts by one rank alone, on a device that shares the host's memory");
  }
  Layout layout = make_layout(units, own.chunk_elements, ranks.rank(), ranks.world(), own.stage);
  Plan plan = make_plan(layout, own, traits_of(*resources.device, *resources.ranks.communicator));
  if (plan.nvme_reserve_bytes > 0 && resources.store == nullptr)
    throw std::invalid_argument("the plan needs a store");
  return {new Machine(std::move(layout), std::move(plan), std::move(own), std::move(resources)), &dispose};
}

Engine::~Engine() {
  if (!machine_->process.here()) return;
  // Where an exception destroys the engine, its rank comes to no further meeting. The other ranks would wait
  // there, so they are told.
  if (std::uncaught_exceptions() > 0) machine_->rounds.abort("its engine was destroyed by an exception");
  if (machine_->rounds.here() || machine_->intake.here()) {
    shut_down_elsewhere(std::move(machine_));
  } else {
    machine_->shut_down();
  }
}

Machine& Engine::machine_to_look_at() const {
  machine_->check_process();
  return *machine_;
}

Machine& Engine::open_machine() const {
  machine_->check_process();
  if (machine_->closed) throw std::invalid_argument(std::string(kClosed));
  return *machine_;
}

Machine& Engine::machine() const {
  Machine& m = open_machine();
  m.check_loaded();
  return m;
}

void Engine::close() {
  if (!machine_->process.here()) return;
  if (machine_->rounds.here() || machine_->intake.here()) {
    throw std::invalid_argument(
        "close() was called on the engine's own thread, by a transport or by a finalizer that ran there. "
        "Call it on another thread: it waits for the end of that one");
  }
  machine_->shut_down();
  {
    const MutexLock guard(machine_->core.mutex());
    if (machine_->core.told == 0) machine_->core.check();
  }
  if (machine_->unsaved) std::rethrow_exception(std::exchange(machine_->unsaved, nullptr));
}

std::shared_ptr<kernels::Device> Engine::device() const {
  return machine_->hardware.shared_device;
}
const Layout& Engine::layout() const {
  return machine_->setup.layout;
}
const Plan& Engine::plan() const {
  return machine_->setup.plan;
}

// ---- forward and backward

void Engine::begin_pass(PassKind kind) {
  Machine& m = machine();
  const InCall call(m.core);
  const MutexLock guard(m.core.mutex());
  m.core.check();
  if (kind.training && kind.grad_enabled) {
    m.core.meter.enter(Phase::forward);
    m.core.journal.note(Happening::forward, -1);
  }
  m.gatherer.trace().begin(kind);
  if (kind.training && kind.grad_enabled) m.updater.resume();
  m.updater.pump();
}

void Engine::begin_backward() {
  Machine& m = machine();
  const MutexLock guard(m.core.mutex());
  m.core.meter.enter(Phase::backward);
  m.core.journal.note(Happening::backward, -1);
}

Lease Engine::acquire(int32_t unit) {
  return lease(unit, Arrived::when_it_is_leased);
}

Lease Engine::acquire(int32_t unit, Queue queue) {
  Lease held = lease(unit, Arrived::when_it_is_used);
  held.use_on(queue);
  return held;
}

Lease Engine::lease(int32_t unit, Arrived arrived) {
  Machine& m = machine();
  const InCall call(m.core);
  const Unit& u = m.unit_at(unit);
  MutexLock lock(m.core.mutex());
  m.core.check();
  ++m.core.progress;
  m.gatherer.trace().acquired(unit);
  m.core.meter.reached(unit);
  m.core.journal.note(Happening::acquired, unit);
  if (m.model.units[unit].pending_chunks > 0) {
    m.demand.want_updates(unit);
    m.updater.pump();
  }
  struct Block* block = nullptr;
  if (m.setup.used_in_place(unit)) {
    m.gatherer.prefetch();
    m.updater.wait_for(unit);
    const UnitState& state = m.model.units[unit];
    switch (m.setup.weight_place(unit)) {
      case WeightPlace::whole_on_host:
        m.gatherer.acquire_whole(unit);
        return {machine_, nullptr, state.whole, u.bytes()};
      case WeightPlace::device:
        block = m.device_units.lease(unit);
        break;
      case WeightPlace::host:
      case WeightPlace::nvme:  // is gathered
        return {machine_, nullptr, state.home, u.bytes()};
    }
  } else if (u.part_bytes > 0) {
    throw std::invalid_argument(fmt::format("{} is read in parts: it cannot be leased", u.name));
  } else {
    block = m.gatherer.acquire(unit);
  }
  std::byte* const data = block->device;
  lock.unlock();
  Lease held(machine_, block, data, u.bytes());  // gives the block back where waiting throws
  if (arrived == Arrived::when_it_is_leased) m.gatherer.wait_for_copy(*block);
  return held;
}

bool Engine::resident_now(int32_t unit) {
  Machine& m = machine();
  m.unit_at(unit);
  const MutexLock guard(m.core.mutex());
  const bool in_place =
      m.setup.used_in_place(unit) && m.setup.weight_place(unit) != WeightPlace::whole_on_host;
  return in_place || m.gatherer.ready(unit);
}

void Engine::replace_gradient(int32_t unit, int32_t segment, std::span<const std::byte> data,
                              std::string_view dtype) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  require_world_one(m.setup.layout, "replacing a gradient");
  if (!data.empty()) m.gradients.check(unit, segment, std::ssize(data), dtype);
  const InCall call(m.core);
  settle_clip(m, s);
  m.intake.replace(unit, segment, data, dtype);
}

// ---- the step

void Engine::expect_step(std::span<const optim::Hyper> groups) {
  Machine& m = machine();
  m.check_groups(groups);
  const MutexLock guard(m.core.mutex());
  m.updater.speculation().expect(groups);
}

StepResult Engine::skip_step(GroupRange range) {
  Machine& m = machine();
  require_world_one(m.setup.layout, "leaving a step out");
  const InCall call(m.core);
  return m.skip_step(range);
}

void Engine::synchronize() {
  Machine& m = machine();
  const MutexLock lock(m.core.mutex());
  m.updater.quiesce();
  m.device_units.finish();
}

// ---- checkpoints

void Engine::save(const std::filesystem::path& folder, std::string_view extra_json) {
  save(folder, [&](const std::filesystem::path&) { return std::string(extra_json); });
}

void Engine::save(const std::filesystem::path& folder, const WriteBeside& write_beside) {
  Machine& m = machine();
  m.wait_for_save();
  synchronize();
  m.save(folder, write_beside);
}

void Engine::save_in_background(const std::filesystem::path& folder, const WriteBeside& write_beside) {
  Machine& m = machine();
  if (!m.setup.config.train_after_save) return save(folder, write_beside);
  m.wait_for_save();
  m.save_in_background(std::filesystem::absolute(folder),
                       write_beside);  // whoever changes the current folder later
}

void Engine::wait_for_save() {
  machine().wait_for_save();
}

void Engine::hurry_save() const {
  machine_to_look_at().keeper.hurry();
}

void Engine::wait_for_snapshot() {
  Machine& m = machine();
  const MutexLock lock(m.core.mutex());
  m.snapshot.wait();
  m.edits_may_be_saved = false;
}

SaveProgress Engine::save_progress() const {
  const Machine& m = machine_to_look_at();
  const SaveMeter& meter = m.keeper.meter();
  return {.under_way = m.background.under_way(), .bytes = meter.bytes, .done_bytes = meter.done()};
}

}  // namespace overspill::engine
