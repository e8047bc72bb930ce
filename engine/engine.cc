#include "engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu_optim/elements.h"
#include "engine/access.h"
#include "engine/machine.h"
#include "io/kept.h"
#include "io/say.h"

namespace overspill::engine {
namespace {

Config checked(Config config) {
  if (config.host_budget_bytes <= 0) throw std::invalid_argument("host_budget_bytes must be positive");
  if (config.threads < 0) throw std::invalid_argument("threads must not be negative");
  if (config.prefetch_units < 0) throw std::invalid_argument("prefetch_units must not be negative");
  if (config.gradient_accumulation < 1)
    throw std::invalid_argument("gradient_accumulation must be at least 1");
  if (!(config.max_grad_norm >= 0)) throw std::invalid_argument("max_grad_norm must not be negative");
  if (config.io_deadline_ms < 0) throw std::invalid_argument("io_deadline_ms must not be negative");
  if (config.checkpoints_kept < 0) throw std::invalid_argument("checkpoints_kept must not be negative");
  return config;
}

void require_world_one(const Layout& layout, const char* what) {
  if (layout.slices != 1)
    throw std::invalid_argument(
        fmt::format("{} needs a world of one rank; this one has {}", what, layout.slices));
}

void check_size(const Segment& segment, size_t bytes, int64_t element_bytes) {
  if (static_cast<int64_t>(bytes) != segment.elements * element_bytes) {
    throw std::invalid_argument(fmt::format("{}: {} bytes were given, {} elements of {} bytes are {}",
                                            segment.name, bytes, segment.elements, element_bytes,
                                            segment.elements * element_bytes));
  }
}

/// Runs what replaces weights or states from outside. Where it fails half of them may be new: the engine has
/// failed.
template <class Change>
void change(Machine& m, const std::string& what, Change apply) {
  try {
    apply();
  } catch (const std::logic_error&) {
    throw;  // a mistake in the program, not a failing disk
  } catch (const std::exception& error) {
    const std::lock_guard guard(m.context.mutex);
    m.context.fail(fmt::format("{}: {}", what, error.what()));
    m.context.check();
  }
}

/// One weight is about to be replaced from outside, on all ranks. At first, while the model is handed over,
/// nobody waits for what was there before, nor where every rank has all weights.
void meet_to_write(Machine& m) {
  if (!m.handed_over || m.context.layout.world == 1) return;
  m.rounds.meet(Meeting::write, ++m.looks, [] {});
}

std::string states_of(const Unit& unit) {
  if (!unit.trainable()) return "it is frozen";
  std::string known = "grad";
  for (const optim::ComponentSpec& spec : unit.components()) {
    if (spec.role == optim::Role::state) known += fmt::format(", {}", spec.name);
  }
  return fmt::format("{} has {}", optim::name(unit.optimizer), known);
}

/// Whether fp32 values of a unit are not the weights that forward uses.
bool has_master(const Unit& unit, std::string_view dtype) {
  return unit.trainable() && dtype == "F32" && unit.dtype != dtype;
}

Component state_named(const Unit& unit, const Segment& segment, std::string_view name) {
  const int component = unit.component_named(name);
  if (!unit.trainable() || component == kComponents ||
      unit.components()[component].role != optim::Role::state) {
    throw std::invalid_argument(fmt::format("{} has no state '{}': {}", segment.name, name, states_of(unit)));
  }
  return Component{static_cast<uint8_t>(component)};
}

/// A gradient of the segment is about to change or to be seen: the scale of clip_grad_norm(), which the step
/// would apply, belongs to those that were there then.
void settle_clip(Machine& m, const Segment& segment) {
  const std::lock_guard turn(m.settling);  // gradients come from several threads
  if (!m.clipped) return;
  if (m.context.layout.world > 1) {
    throw std::invalid_argument(fmt::format(
        "a gradient of {} came after clip_grad_norm(), which scaled the earlier gradients by {}, and "
        "those of several ranks are summed by then: take the step or clear the gradients first, and "
        "clip only after the last backward of a step",
        segment.name, *m.clipped));
  }
  m.intake.finish();
  m.settle_clip();
}

/// A segment that has gradients.
const Segment& trained(const Machine& m, int32_t unit, int32_t segment) {
  const Segment& s = m.segment_at(unit, segment);
  if (!m.unit_at(unit).trainable())
    throw std::invalid_argument(fmt::format("{} is frozen: it has no gradient", s.name));
  return s;
}

void require_whole_or_one(const Machine& m, GroupRange range) {
  if (!range.all()) require_world_one(m.context.layout, "several optimizers over one model");
}

/// Throws gradients away, or makes them zeros, and with them what clip_grad_norm() meant for them.
void change_gradients(Machine& m, GroupRange range, void (Gradients::*change)()) {
  require_whole_or_one(m, range);
  m.forget_guesses();
  if (!range.all()) m.settle_clip();
  const Gradients::Only only(m.gradients, range);
  if (m.gradients.any()) {
    m.rounds.meet(Meeting::clear, m.looks, [&] { (m.gradients.*change)(); });
  } else {
    (m.gradients.*change)();
  }
  m.forget_clip();
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
      machine->context.host_budget.used_bytes()));
  io::keep_for_ever(std::move(last));
}

/// For a caller on the thread of the rounds, who cannot wait for that thread's end.
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

/// For the report: while this object lives, the report counts the caller's time as spent in the engine.
class InCall {
 public:
  explicit InCall(Context& context) : context_(context) {
    const std::lock_guard guard(context_.mutex);
    context_.meter.begin(Activity::call);
  }
  ~InCall() {
    const std::lock_guard guard(context_.mutex);
    context_.meter.end(Activity::call);
  }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  Context& context_;
};

}  // namespace

// ---- the engine

Engine::Engine(const std::vector<UnitSpec>& units, const Config& config, Resources resources) {
  Resources ranks;
  ranks.communicator = resources.communicator;
  ranks.model_ranks = resources.model_ranks;
  try {
    machine_ = build(units, config, std::move(resources));
  } catch (const std::exception& error) {
    ranks.abort_ranks(error.what());  // else the other ranks would wait for an engine that was never built
    throw;
  }
}

std::shared_ptr<Machine> Engine::build(const std::vector<UnitSpec>& units, const Config& config,
                                       Resources resources) {
  Config own = checked(config);
  if (resources.device == nullptr || resources.communicator == nullptr || resources.executor == nullptr) {
    throw std::invalid_argument("an engine needs a device, a communicator and an executor");
  }
  const Communicator& ranks = *resources.communicator;
  if (own.speculate && ranks.world() > 1) {
    throw std::invalid_argument(
        fmt::format("speculate needs a world of one rank; this one has {}", ranks.world()));
  }
  if (own.library_sums && ranks.world() > 1 && !ranks.reduces()) {
    throw std::invalid_argument(
        "library_sums: this transport has no reduction of its own (MPI and NCCL have); leave it out");
  }
  Layout layout = make_layout(units, own.chunk_elements, ranks.rank(), ranks.world(), own.stage);
  Plan plan = make_plan(layout, own, traits_of(*resources.device, *resources.communicator));
  if (plan.nvme_bytes() > 0 && resources.store == nullptr)
    throw std::invalid_argument("the plan needs a store");
  return {new Machine(std::move(layout), std::move(plan), std::move(own), std::move(resources)), &dispose};
}

Engine::~Engine() {
  if (!machine_->process.here()) return;
  // Where an exception destroys the engine, its rank comes to no further meeting. The other ranks would wait
  // there, so they are told.
  if (std::uncaught_exceptions() > 0) machine_->rounds.abort("its engine was destroyed by an exception");
  if (machine_->rounds.here()) {
    shut_down_elsewhere(std::move(machine_));
  } else {
    machine_->shut_down();
  }
}

Machine& Engine::machine_to_look_at() const {
  machine_->check_process();
  return *machine_;
}

Machine& Engine::machine() const {
  machine_->check_process();
  if (machine_->closed) throw std::invalid_argument(std::string(kClosed));
  return *machine_;
}

void Engine::close() {
  if (!machine_->process.here()) return;
  if (machine_->rounds.here()) {
    throw std::invalid_argument(
        "close() was called on the thread that makes this engine's collective calls (by a transport, or by a "
        "finalizer that ran in one). close() waits for that thread to end: call it on another thread");
  }
  machine_->shut_down();
  const std::lock_guard guard(machine_->context.mutex);
  if (!machine_->context.told) machine_->context.check();
}

std::shared_ptr<kernels::Device> Engine::device() const {
  return machine_->context.resources.device;
}
const Layout& Engine::layout() const {
  return machine_->context.layout;
}
const Plan& Engine::plan() const {
  return machine_->context.plan;
}

// ---- weights and states from outside

void Engine::load_weight(int32_t unit, int32_t segment, std::span<const std::byte> data,
                         std::string_view dtype) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Unit& u = m.unit_at(unit);
  const bool master = has_master(u, dtype);
  if (!master && dtype != u.dtype) {
    throw std::invalid_argument(
        fmt::format("{} is kept as {}: {} cannot be loaded into it", s.name, u.dtype, dtype));
  }
  const int64_t width = master ? 4 : u.element_bytes;
  check_size(s, data.size(), width);
  meet_to_write(m);
  std::unique_lock lock(m.context.mutex);
  const Rounds::Change changing(m.rounds, lock);
  m.prepare_to_change(lock, std::span(&unit, 1));
  lock.unlock();
  const Machine::Part own = m.own_part(unit, segment);
  if (own.elements == 0) return;
  const auto part = own.of(data, width);
  change(m, "loading " + s.name, [&] {
    if (!master) {
      m.access.write(unit, Component::hi, own.in_shard, part);
      return m.access.match_master(unit, own.in_shard, part);
    }
    std::vector<float> values(static_cast<size_t>(std::min(kPieceElements, own.elements)));
    for (int64_t done = 0; done < own.elements; done += kPieceElements) {
      const int64_t count = std::min(kPieceElements, own.elements - done);
      std::memcpy(values.data(), part.data() + done * 4, static_cast<size_t>(count * 4));
      m.access.write_weights(unit, own.in_shard + done,
                             std::span<const float>(values).first(static_cast<size_t>(count)));
    }
  });
}

void Engine::read_weight(int32_t unit, int32_t segment, std::span<std::byte> out, std::string_view dtype) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Unit& u = m.unit_at(unit);
  const bool master = has_master(u, dtype);
  if (!master && dtype != u.dtype) {
    throw std::invalid_argument(
        fmt::format("{} is kept as {}: it cannot be read as {}", s.name, u.dtype, dtype));
  }
  check_size(s, out.size(), master ? 4 : u.element_bytes);
  {
    std::unique_lock lock(m.context.mutex);
    m.updater.quiesce(lock);
  }
  const int64_t width = master ? 4 : u.element_bytes;
  const Machine::Part own = m.own_part(unit, segment);
  const auto part = own.of(out, width);
  if (!master && own.elements > 0) m.access.read(unit, Component::hi, own.in_shard, part);
  std::vector<float> values(static_cast<size_t>(master ? std::min(kPieceElements, own.elements) : 0));
  for (int64_t done = 0; master && done < own.elements; done += kPieceElements) {
    const int64_t count = std::min(kPieceElements, own.elements - done);
    m.access.read_weights(unit, own.in_shard + done, std::span(values).first(static_cast<size_t>(count)));
    std::memcpy(part.data() + done * 4, values.data(), static_cast<size_t>(count * 4));
  }
  m.share(unit, segment, out, width);
}

void Engine::start_states(std::span<const optim::Hyper> groups) {
  Machine& m = machine();
  m.check_groups(groups);
  {
    std::unique_lock lock(m.context.mutex);
    m.updater.quiesce(lock);
  }
  change(m, "starting the optimizer's states", [&] { m.start_states(groups); });
  m.handed_over = true;
}

void Engine::read_state(int32_t unit, int32_t segment, std::string_view name, std::span<float> out) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Unit& u = m.unit_at(unit);
  check_size(s, out.size_bytes(), 4);
  if (name == "grad") {
    require_world_one(m.context.layout, "reading a gradient");
    m.intake.finish();
    m.gradients.read(unit, segment, 0, out);
    if (m.clipped) {
      for (float& value : out) value *= static_cast<float>(*m.clipped);
    }
    return;
  }
  const Component component = state_named(u, s, name);
  {
    std::unique_lock lock(m.context.mutex);
    m.updater.quiesce(lock);
  }
  const Machine::Part own = m.own_part(unit, segment);
  if (own.elements > 0) m.access.read_state(unit, component, own.in_shard, own.of(out));
  m.share(unit, segment, std::as_writable_bytes(out), 4);
}

std::pair<int64_t, int64_t> Engine::own_part(int32_t unit, int32_t segment) {
  Machine& m = machine();
  m.segment_at(unit, segment);
  const Machine::Part own = m.own_part(unit, segment);
  return {own.begin, own.elements};
}

void Engine::read_own_state(int32_t unit, int32_t segment, std::string_view name, std::span<float> out) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Component component = state_named(m.unit_at(unit), s, name);
  const Machine::Part own = m.own_part(unit, segment);
  if (std::ssize(out) != own.elements) {
    throw std::invalid_argument(
        fmt::format("{}: {} elements were given, this rank has {}", s.name, out.size(), own.elements));
  }
  {
    std::unique_lock lock(m.context.mutex);
    m.updater.quiesce(lock);
  }
  if (own.elements > 0) m.access.read_state(unit, component, own.in_shard, out);
}

void Engine::write_state(int32_t unit, int32_t segment, std::string_view name,
                         std::span<const float> values) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Component component = state_named(m.unit_at(unit), s, name);
  check_size(s, values.size_bytes(), 4);
  {
    std::unique_lock lock(m.context.mutex);
    m.updater.quiesce(lock);
  }
  const Machine::Part own = m.own_part(unit, segment);
  if (own.elements == 0) return;
  change(m, "writing a state of " + s.name,
         [&] { m.access.write_state(unit, component, own.in_shard, own.of(values)); });
}

int64_t Engine::updates_of(int32_t unit, int32_t segment) {
  Machine& m = machine();
  m.segment_at(unit, segment);
  const std::lock_guard guard(m.context.mutex);
  return m.context.units[unit].steps[segment];
}

void Engine::set_updates_of(int32_t unit, int32_t segment, int64_t updates) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  if (!m.unit_at(unit).trainable() || updates < 0) {
    throw std::invalid_argument(fmt::format("{} cannot have {} updates: {}", s.name, updates,
                                            updates < 0 ? "a count is expected" : "it is frozen"));
  }
  std::unique_lock lock(m.context.mutex);
  m.updater.quiesce(lock);
  m.context.units[unit].steps[segment] = updates;
}

// ---- forward and backward

void Engine::begin_pass(PassKind kind) {
  Machine& m = machine();
  const InCall call(m.context);
  const std::lock_guard guard(m.context.mutex);
  m.context.check();
  if (kind.training && kind.grad_enabled) m.context.meter.enter(Phase::forward);
  m.context.trace.begin(kind);
  if (kind.training && kind.grad_enabled) m.updater.resume();
  m.updater.pump();
}

void Engine::begin_backward() {
  Machine& m = machine();
  const std::lock_guard guard(m.context.mutex);
  m.context.meter.enter(Phase::backward);
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
  const InCall call(m.context);
  const Unit& u = m.unit_at(unit);
  std::unique_lock lock(m.context.mutex);
  m.context.check();
  ++m.context.progress;
  m.context.trace.acquired(unit);
  m.context.meter.reached(unit);
  m.context.journal.note(Happening::acquired, unit);
  if (m.context.units[unit].pending_chunks > 0) {
    m.context.demand(unit);
    m.updater.pump();
  }
  struct Block* block = nullptr;
  if (m.context.used_in_place(unit)) {
    m.gatherer.prefetch(lock);
    m.updater.wait_for(lock, unit);
    if (!m.device_units.hold(unit)) {
      const UnitState& state = m.context.units[unit];
      if (state.whole != nullptr) m.gatherer.acquire_whole(lock, unit);
      return {machine_, nullptr, state.whole != nullptr ? state.whole : state.home, u.bytes()};
    }
    block = m.device_units.lease(unit);
  } else {
    block = m.gatherer.acquire(lock, unit);
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
  const std::lock_guard guard(m.context.mutex);
  const bool in_place = m.context.used_in_place(unit) && m.context.units[unit].whole == nullptr;
  return in_place || m.gatherer.ready(unit);
}

void Engine::written(int32_t unit, int32_t segment, std::span<const std::byte> data) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Unit& u = m.unit_at(unit);
  check_size(s, data.size(), u.element_bytes);
  if (m.context.layout.world >
      1) {  // each rank keeps its shard of it; `data` may be the leased memory itself
    const std::vector<std::byte> copy(data.begin(), data.end());
    return load_weight(unit, segment, copy, u.dtype);
  }
  meet_to_write(m);
  {
    std::unique_lock lock(m.context.mutex);
    const Rounds::Change changing(m.rounds, lock);
    m.updater.quiesce(lock);
    ++m.context.units[unit].generation;
    // A lease that is older than the weight has memory of its own. Of a device's memory `data` is a copy: who
    // writes there holds the block of now, if anybody does.
    const Block* block = m.context.units[unit].block;
    const bool on_host = m.context.device().shares_host_memory();
    const bool is_leased_now =
        block != nullptr &&
        (on_host ? data.data() == block->device + s.begin * u.element_bytes : block->leases > 0);
    if (!is_leased_now) m.gatherer.invalidate(lock, std::span(&unit, 1));
  }
  const bool in_place = m.context.units[unit].home != nullptr &&
                        data.data() == m.context.units[unit].home + s.begin * u.element_bytes;
  change(m, "writing " + s.name, [&] {
    if (!in_place) m.access.write(unit, Component::hi, s.begin, data);
    m.access.match_master(unit, s.begin, data);
  });
}

void Engine::add_gradient(int32_t unit, int32_t segment, std::span<const std::byte> data,
                          std::string_view dtype) {
  Machine& m = machine();
  settle_clip(m, m.segment_at(unit, segment));
  const InCall call(m.context);
  m.intake.add(unit, segment, data, dtype);
}

void Engine::add_gradient(int32_t unit, int32_t segment, DeviceArray gradient, Queue queue) {
  Machine& m = machine();
  settle_clip(m, m.segment_at(unit, segment));
  const InCall call(m.context);
  m.intake.add(unit, segment, std::move(gradient), queue);
}

void Engine::clear_gradients(GroupRange range) {
  change_gradients(machine(), range, &Gradients::throw_away);
}

void Engine::zero_gradients(GroupRange range) {
  change_gradients(machine(), range, &Gradients::become_zero);
}

void Engine::clipped_by_caller() {
  machine().caller_clipped = true;
}

void Engine::replace_gradient(int32_t unit, int32_t segment, std::span<const std::byte> data,
                              std::string_view dtype) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  require_world_one(m.context.layout, "replacing a gradient");
  if (!data.empty()) m.gradients.check(unit, segment, std::ssize(data), dtype);
  const InCall call(m.context);
  settle_clip(m, s);
  m.intake.replace(unit, segment, data, dtype);
}

void Engine::read_gradient(int32_t unit, int32_t segment, std::span<std::byte> out, std::string_view dtype) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  require_world_one(m.context.layout, "reading a gradient");
  const optim::Element element = m.gradients.check(unit, segment, std::ssize(out), dtype);
  const InCall call(m.context);
  settle_clip(m, s);
  m.intake.finish();
  std::vector<float> values(static_cast<size_t>(std::min(kPieceElements, s.elements)));
  for (int64_t begin = 0; begin < s.elements;) {
    const int64_t count = std::min(kPieceElements, s.elements - begin);
    const auto piece = std::span(values).first(static_cast<size_t>(count));
    m.gradients.read(unit, segment, begin, piece);
    optim::narrow(element, piece, out.data() + begin * optim::bytes(element));
    begin += count;
  }
}

bool Engine::read_whole_gradient(int32_t unit, int32_t segment, std::span<float> out) {
  Machine& m = machine();
  const Segment& s = trained(m, unit, segment);
  check_size(s, out.size_bytes(), 4);
  if (m.context.layout.slices > 1) return m.read_whole_gradient(unit, segment, out);
  if (!has_gradient(unit, segment)) return false;
  read_state(unit, segment, "grad", out);
  return true;
}

bool Engine::replace_whole_gradient(int32_t unit, int32_t segment, std::span<const float> values) {
  Machine& m = machine();
  const Segment& s = trained(m, unit, segment);
  check_size(s, values.size_bytes(), 4);
  if (m.context.layout.slices > 1) return m.replace_whole_gradient(unit, segment, values);
  if (!has_gradient(unit, segment)) return false;
  const optim::Element type = m.context.gradient_type(unit);
  std::vector<std::byte> narrowed(values.size() * static_cast<size_t>(optim::bytes(type)));
  optim::narrow(type, values, narrowed.data());
  replace_gradient(unit, segment, narrowed, type == optim::Element::fp32 ? "F32" : m.unit_at(unit).dtype);
  return true;
}

bool Engine::read_own_gradient(int32_t unit, int32_t segment, std::span<float> out) {
  Machine& m = machine();
  const Segment& s = trained(m, unit, segment);
  if (m.context.layout.slices == 1) return read_whole_gradient(unit, segment, out);
  check_size(s, out.size_bytes(), 4);
  return m.read_own_gradient(unit, segment, out);
}

void Engine::reuse_gradients() {
  Machine& m = machine();
  require_world_one(m.context.layout, "using a step's gradients again");
  m.intake.finish();
  m.gradients.reuse();
}

bool Engine::has_gradient(int32_t unit, int32_t segment) {
  Machine& m = machine();
  m.segment_at(unit, segment);
  m.intake.finish();
  const std::lock_guard guard(m.context.mutex);
  return m.gradients.present(unit, segment);
}

int64_t Engine::generation(int32_t unit) {
  Machine& m = machine();
  m.unit_at(unit);
  const std::lock_guard guard(m.context.mutex);
  return m.context.units[unit].generation;
}

void Engine::use_gradients(GroupRange range) {
  Machine& m = machine();
  require_world_one(m.context.layout, "an update of one's own");
  m.intake.finish();
  m.settle_clip();
  m.forget_clip();
  const Gradients::Only only(m.gradients, range);
  m.intake.write_zeros();
  const std::lock_guard guard(m.context.mutex);
  m.gradients.handed_over();
}

// ---- the step

void Engine::expect_step(std::span<const optim::Hyper> groups) {
  Machine& m = machine();
  m.check_groups(groups);
  const std::lock_guard guard(m.context.mutex);
  m.updater.speculation().expect(groups);
}

StepResult Engine::step(std::span<const optim::Hyper> groups, GroupRange range) {
  Machine& m = machine();
  require_whole_or_one(m, range);
  if (!range.all() && m.context.config.max_grad_norm > 0) {
    throw std::invalid_argument(fmt::format(
        "max_grad_norm = {} is a limit for the norm of all gradients, and this step has those of some groups",
        m.context.config.max_grad_norm));
  }
  const InCall call(m.context);
  return m.step(groups, range);
}

StepResult Engine::skip_step(GroupRange range) {
  Machine& m = machine();
  require_world_one(m.context.layout, "leaving a step out");
  const InCall call(m.context);
  return m.skip_step(range);
}

double Engine::grad_norm(GroupRange range) {
  Machine& m = machine();
  require_whole_or_one(m, range);
  m.intake.finish();
  const Gradients::Only only(m.gradients, range);
  m.intake.write_zeros();
  GradientSummary summary;
  m.rounds.meet(Meeting::norm, m.looks, [&] {
    m.rounds.sum_gradients();
    m.gradients.reduce_presence();
    summary = m.gradients.summarize();
  });
  return m.norm_of(summary) * m.clipped.value_or(1.0);
}

double Engine::clip_grad_norm(double max_norm) {
  if (!(max_norm > 0)) throw std::invalid_argument("max_norm must be positive");
  Machine& m = machine();
  const double norm = grad_norm();
  if (!std::isinf(max_norm) && m.gradients.any()) {
    m.clipped = m.clipped.value_or(1.0) * clip_factor(norm, max_norm);
    m.caller_clipped = true;
  }
  return norm;
}

void Engine::synchronize() {
  Machine& m = machine();
  std::unique_lock lock(m.context.mutex);
  m.updater.quiesce(lock);
  m.device_units.finish(lock);
}

// ---- checkpoints

void Engine::save(const std::filesystem::path& folder, std::string_view extra_json) {
  synchronize();
  machine().save(folder, [&](const std::filesystem::path&) { return std::string(extra_json); });
}

void Engine::save(const std::filesystem::path& folder, const WriteBeside& write_beside) {
  synchronize();
  machine().save(folder, write_beside);
}

std::string Engine::load(const std::filesystem::path& folder) {
  Machine& m = machine();
  m.keeper.require_room_to_change();
  const Manifest manifest = m.verify(folder);
  m.intake.finish();
  std::unique_lock lock(m.context.mutex);
  const Rounds::Change changing(m.rounds, lock);
  std::vector<int32_t> all(m.context.units.size());
  std::iota(all.begin(), all.end(), 0);
  m.prepare_to_change(lock, all);
  lock.unlock();
  m.gradients.clear();
  m.forget_clip();
  change(m, "loading " + folder.string() + " was cut off", [&] { m.keeper.load(folder, manifest); });
  lock.lock();
  m.steps = manifest.step;
  m.skipped_steps = manifest.skipped_steps;
  m.handed_over = true;
  return manifest.extra_json;
}

}  // namespace overspill::engine
