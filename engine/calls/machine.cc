#include "engine/calls/machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace overspill::engine {

Machine::Machine(Layout layout, Plan plan, Config config, Resources resources)
    : Owners(std::move(layout), std::move(plan), std::move(config), std::move(resources)),
      queues(hardware.device()),
      squares(setup, core, hardware, model),
      device_units(setup, core, hardware, model, squares),
      gatherer(setup, core, hardware, model, demand),
      snapshot(core, model),
      updater(setup, core, hardware, model, demand, gatherer, snapshot),
      gradients(setup, core, hardware, model, ranks, device_units, squares),
      intake(setup, core, hardware, queues, updater, gradients),
      activations(setup, core, hardware),
      access(setup, core, hardware, model, device_units),
      keeper(setup, core, model, access),
      background(setup, core, snapshot, keeper),
      rounds(setup, core, ranks, demand, gatherer, updater, gradients),
      stalls(core.store.watch() != nullptr ? core.store.watch()->board() : nullptr) {
  keeper.take_room();
  // Beyond this point nothing fails: from the start of its rounds on, the other ranks count on this one.
  rounds.start();
}

void Machine::check_process() const {
  if (process.here()) return;
  throw WrongProcess(fmt::format(
      "the engine belongs to process {}; this is its forked child {}, which has neither the engine's threads "
      "nor its memory: make a new engine in this child, or start the child by spawn instead of fork",
      process.pid(), ::getpid()));
}

Machine::~Machine() {
  shut_down();
}

void Machine::shut_down() noexcept {
  if (!process.here()) return;
  std::call_once(shut_down_, [this] { finish(); });
}

void Machine::finish() noexcept {
  closed = true;
  unsaved = background.join();  // with the updates that it waits for, and with the other ranks
  intake.close();
  rounds.leave();
  // All ranks are here, and nobody makes a collective call any more. A lease may live on, and its holder must
  // not be the one who waits for other ranks.
  ranks.leave();
  {
    const MutexLock lock(core.mutex());
    try {
      updater.quiesce();
    } catch (const std::exception&) {
      --core.told;  // it has failed: whoever used it was told, or is by Engine::close()
    }
    if (core.failure.empty()) {
      core.failure = std::string(kClosed);  // nothing new is started
      ++core.told;
    }
    core.changed.notify_all();  // whoever waits still, waits for nothing
  }
  // Tasks and transfers point into this object: none may be left.
  hardware.executor.reset();
  if (core.store.exists()) {
    core.store->drain();
    kernel_keeps_memory = core.store->kernel_keeps_memory();
  }
  std::unique_ptr<io::Store> store;  // ends without the mutex, which its threads take
  const MutexLock lock(core.mutex());
  store = core.store.take();
}

const Unit& Machine::unit_at(int32_t unit) const {
  if (unit < 0 || unit >= static_cast<int32_t>(setup.layout.units.size())) {
    throw std::invalid_argument(
        fmt::format("there is no unit {}: the model has {}", unit, setup.layout.units.size()));
  }
  return setup.layout.units[unit];
}

const Segment& Machine::segment_at(int32_t unit, int32_t segment) const {
  const Unit& u = unit_at(unit);
  if (segment < 0 || segment >= static_cast<int32_t>(u.segments.size())) {
    throw std::invalid_argument(
        fmt::format("unit {} has no segment {}: it has {}", u.name, segment, u.segments.size()));
  }
  return u.segments[segment];
}

void Machine::start_states(std::span<const optim::Hyper> groups) {
  for (size_t u = 0; u < setup.layout.units.size(); ++u) {
    const Unit& unit = setup.layout.units[u];
    const int64_t shard = setup.layout.shard * unit.shard_elements;
    for (size_t c = 0; c < unit.components().size(); ++c) {
      const optim::ComponentSpec& spec = unit.components()[c];
      if (spec.role != optim::Role::state) continue;
      for (const Segment& segment : unit.segments) {
        const float value = optim::initial_state(groups[segment.group], spec.state);
        const int64_t from = std::max(segment.begin, shard);
        const int64_t to = std::min(segment.begin + segment.elements, shard + unit.shard_elements);
        if (value == 0 || from >= to) continue;
        access.fill_state(static_cast<int32_t>(u), Component{static_cast<uint8_t>(c)}, from - shard,
                          to - from, value);
      }
    }
  }
}

Machine::Part Machine::part_of(int rank, int32_t unit, int32_t segment) const {
  const Unit& u = setup.layout.units[unit];
  const Segment& s = u.segments[segment];
  const int64_t shard = rank * u.shard_elements;
  const int64_t begin = std::max(s.begin, shard);
  const int64_t end = std::min(s.begin + s.elements, shard + u.shard_elements);
  return begin < end ? Part{begin - s.begin, end - begin, begin - shard} : Part{};
}

void Machine::settle_clip() {
  if (!clipped) return;
  gradients.scale(*clipped);
  clipped.reset();
}

void Machine::forget_guesses() {
  intake.finish();
  const MutexLock lock(core.mutex());
  updater.take_back_all();
  updater.speculation().restart();
}

void Machine::prepare_to_change(std::span<const int32_t> units) {
  updater.quiesce();
  for (int32_t unit : units) ++model.units[unit].generation;
  gatherer.invalidate(units);
}

void Machine::share(int32_t unit, int32_t segment, std::span<std::byte> out, int64_t width) {
  if (setup.layout.shards == 1) return;
  rounds.meet(Meeting::look, ++looks, [&] { exchange_parts(unit, segment, out, width); });
}

void Machine::exchange_parts(int32_t unit, int32_t segment, std::span<std::byte> out, int64_t width) {
  const Layout& layout = setup.layout;
  const auto bytes_of = [&](int rank) { return part_of(rank, unit, segment).of(out, width); };
  std::vector<std::span<const std::byte>> send(static_cast<size_t>(layout.shards), bytes_of(layout.shard));
  std::vector<std::span<std::byte>> receive;
  for (int rank = 0; rank < layout.shards; ++rank) receive.push_back(bytes_of(rank));
  ranks.communicator->exchange(send, receive);
}

}  // namespace overspill::engine
