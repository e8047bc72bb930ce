// Weights and states from outside (engine.h): read, replaced, counted.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "cpu_optim/elements.h"
#include "cpu_optim/optimizer.h"
#include "engine/calls/calls.h"
#include "engine/calls/machine.h"
#include "engine/engine.h"
#include "engine/weights/access.h"

namespace overspill::engine {
namespace {

/// One weight is about to be replaced from outside, on all ranks. At first, while the model is handed over,
/// nobody waits for what was there before, nor where every rank has all weights.
void meet_to_write(Machine& m) {
  if (!m.handed_over || m.setup.layout.shards == 1) return;
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

/// What a caller gives or takes of a weight: what forward uses, or the fp32 master beside it.
struct Form {
  bool master = false;
  int64_t element_bytes = 0;
};

/// Throws std::invalid_argument, which ends in `refusal`, for a dtype that the unit has in neither form.
Form form_of(const Unit& unit, const Segment& segment, std::string_view dtype, std::string_view refusal) {
  if (dtype == unit.dtype) return {false, unit.element_bytes};
  if (unit.trainable() && dtype == "F32") return {true, 4};
  throw std::invalid_argument(fmt::format("{} is kept as {}: {}", segment.name, unit.dtype, refusal));
}

Component state_named(const Unit& unit, const Segment& segment, std::string_view name) {
  const int component = unit.component_named(name);
  if (!unit.trainable() || component == kComponents ||
      unit.components()[component].role != optim::Role::state) {
    throw std::invalid_argument(fmt::format("{} has no state '{}': {}", segment.name, name, states_of(unit)));
  }
  return Component{static_cast<uint8_t>(component)};
}

/// Whether `data` is where the segment's weight lives, and not a copy that was leased.
bool is_at_home(const Machine& m, int32_t unit, const Segment& segment, std::span<const std::byte> data) {
  const std::byte* home = m.model.units[unit].home;
  return home != nullptr && data.data() == home + segment.begin * m.unit_at(unit).element_bytes;
}

}  // namespace

void Engine::load_weight(int32_t unit, int32_t segment, std::span<const std::byte> data,
                         std::string_view dtype) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Unit& u = m.unit_at(unit);
  const Form form = form_of(u, s, dtype, fmt::format("{} cannot be loaded into it", dtype));
  check_size(s, data.size(), form.element_bytes);
  m.touched = true;
  meet_to_write(m);
  MutexLock lock(m.core.mutex());
  const Rounds::Change changing(m.rounds);
  m.prepare_to_change(std::span(&unit, 1));
  lock.unlock();
  const Machine::Part own = m.own_part(unit, segment);
  if (own.elements == 0) return;
  const auto part = own.of(data, form.element_bytes);
  change(m, "loading " + s.name, [&] {
    if (!form.master) {
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
  const Form form = form_of(u, s, dtype, fmt::format("it cannot be read as {}", dtype));
  check_size(s, out.size(), form.element_bytes);
  {
    const MutexLock lock(m.core.mutex());
    m.updater.quiesce();
  }
  const Machine::Part own = m.own_part(unit, segment);
  const auto part = own.of(out, form.element_bytes);
  if (!form.master && own.elements > 0) m.access.read(unit, Component::hi, own.in_shard, part);
  std::vector<float> values(static_cast<size_t>(form.master ? std::min(kPieceElements, own.elements) : 0));
  for (int64_t done = 0; form.master && done < own.elements; done += kPieceElements) {
    const int64_t count = std::min(kPieceElements, own.elements - done);
    m.access.read_weights(unit, own.in_shard + done, std::span(values).first(static_cast<size_t>(count)));
    std::memcpy(part.data() + done * 4, values.data(), static_cast<size_t>(count * 4));
  }
  m.share(unit, segment, out, form.element_bytes);
}

void Engine::start_states(std::span<const optim::Hyper> groups) {
  Machine& m = machine();
  m.check_groups(groups);
  {
    const MutexLock lock(m.core.mutex());
    m.updater.quiesce();
  }
  change(m, "starting the optimizer's states", [&] { m.start_states(groups); });
  m.handed_over = true;
  m.touched = false;
}

void Engine::read_state(int32_t unit, int32_t segment, std::string_view name, std::span<float> out) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Unit& u = m.unit_at(unit);
  check_size(s, out.size_bytes(), 4);
  if (name == "grad") {
    require_world_one(m.setup.layout, "reading a gradient");
    m.intake.finish();
    m.gradients.read(unit, segment, 0, out);
    if (m.clipped) {
      for (float& value : out) value *= static_cast<float>(*m.clipped);
    }
    return;
  }
  const Component component = state_named(u, s, name);
  {
    const MutexLock lock(m.core.mutex());
    m.updater.quiesce();
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
    const MutexLock lock(m.core.mutex());
    m.updater.quiesce();
  }
  if (own.elements > 0) m.access.read_state(unit, component, own.in_shard, out);
}

void Engine::write_state(int32_t unit, int32_t segment, std::string_view name,
                         std::span<const float> values) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Component component = state_named(m.unit_at(unit), s, name);
  check_size(s, values.size_bytes(), 4);
  m.touched = true;
  {
    const MutexLock lock(m.core.mutex());
    m.updater.quiesce();
  }
  const Machine::Part own = m.own_part(unit, segment);
  if (own.elements == 0) return;
  change(m, "writing a state of " + s.name,
         [&] { m.access.write_state(unit, component, own.in_shard, own.of(values)); });
}

int64_t Engine::updates_of(int32_t unit, int32_t segment) {
  Machine& m = machine();
  m.segment_at(unit, segment);
  const MutexLock guard(m.core.mutex());
  return m.model.units[unit].steps[segment];
}

void Engine::set_updates_of(int32_t unit, int32_t segment, int64_t updates) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  if (!m.unit_at(unit).trainable() || updates < 0) {
    throw std::invalid_argument(fmt::format("{} cannot have {} updates: {}", s.name, updates,
                                            updates < 0 ? "a count is expected" : "it is frozen"));
  }
  m.touched = true;
  const MutexLock lock(m.core.mutex());
  m.updater.quiesce();
  m.model.units[unit].steps[segment] = updates;
}

void Engine::written(int32_t unit, int32_t segment, std::span<const std::byte> data) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Unit& u = m.unit_at(unit);
  check_size(s, data.size(), u.element_bytes);
  m.touched = true;
  if (m.setup.layout.shards > 1) {  // each rank keeps its shard of it; `data` may be the leased memory itself
    const std::vector<std::byte> copy(data.begin(), data.end());
    return load_weight(unit, segment, copy, u.dtype);
  }
  meet_to_write(m);
  {
    const MutexLock lock(m.core.mutex());
    const Rounds::Change changing(m.rounds);
    if (is_at_home(m, unit, s, data)) m.forget_snapshot(s.name);
    m.updater.quiesce();
    ++m.model.units[unit].generation;
    // A lease that is older than the weight has memory of its own. Of a device's memory `data` is a copy: who
    // writes there holds the block of now, if anybody does.
    const Block* block = m.model.units[unit].block;
    const bool on_host = m.hardware.device().shares_host_memory();
    const bool is_leased_now =
        block != nullptr &&
        (on_host ? data.data() == block->device + s.begin * u.element_bytes : block->leases > 0);
    if (!is_leased_now) m.gatherer.invalidate(std::span(&unit, 1));
  }
  const bool in_place = is_at_home(m, unit, s, data);
  change(m, "writing " + s.name, [&] {
    if (!in_place) m.access.write(unit, Component::hi, s.begin, data);
    m.access.match_master(unit, s.begin, data);
  });
}

int64_t Engine::generation(int32_t unit) {
  Machine& m = machine();
  m.unit_at(unit);
  const MutexLock guard(m.core.mutex());
  return m.model.units[unit].generation;
}

}  // namespace overspill::engine
