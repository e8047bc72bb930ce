#include "engine/states/ring.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace overspill::engine {

StateRing::StateRing(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, User& user)
    : setup_(setup),
      core_(core),
      model_(model),
      user_(user),
      memory_(hardware.host_budget, setup.plan.ring_slots * setup.plan.ring_slot_bytes, "the ring of states"),
      slots_(static_cast<size_t>(setup.plan.ring_slots)) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.ring = this;
    slot.index = static_cast<int32_t>(i);
    slot.memory = memory_.data() + static_cast<int64_t>(i) * setup.plan.ring_slot_bytes;
    for (io::Transfer& transfer : slot.transfers) {
      transfer.on_complete = &StateRing::on_transfer;
      transfer.context = &slot;
      slot.states.emplace_back(setup.plan.ring_slot_bytes);
    }
    slot.gradient.on_complete = &StateRing::on_transfer;
    slot.gradient.context = &slot;
  }
  if (memory_.bytes() > 0) core.store->register_memory(memory_.span());
  check_slots();
}

/// Before anything is read into a slot: what a read would write behind its end belongs to another chunk.
void StateRing::check_slots() const {
  for (int32_t chunk = 0; chunk < std::ssize(model_.chunks); ++chunk) {
    const Unit& unit = setup_.layout.units[setup_.layout.chunks[chunk].unit];
    if (!unit.trainable() || !setup_.touches_nvme(chunk)) continue;
    const int64_t gradient = setup_.plan.gradients_on_nvme[chunk] ? setup_.gradient_bytes(chunk) : 0;
    const int64_t bytes = components_bytes(chunk) + gradient;
    if (bytes <= setup_.plan.ring_slot_bytes) continue;
    throw std::logic_error(fmt::format("chunk {} of {} takes {} bytes in a slot of the ring, which has {}",
                                       chunk - unit.first_chunk, unit.name, bytes,
                                       setup_.plan.ring_slot_bytes));
  }
}

/// Of those in the store.
int64_t StateRing::components_bytes(int32_t chunk) const {
  int64_t bytes = 0;
  for (Component component : kAllComponents) {
    if (setup_.in_store(chunk, component)) bytes += setup_.component_bytes(chunk, component);
  }
  return bytes;
}

size_t StateRing::slot_of(int32_t chunk) const {
  const int32_t slot = model_.chunks[chunk].slot;
  if (slot < 0 || slot >= slots() || slots_[slot].chunk != chunk) {
    throw std::logic_error(fmt::format("chunk {} is said to be in slot {} of the ring's {}, and is not",
                                       chunk, slot, slots_.size()));
  }
  return static_cast<size_t>(slot);
}

bool StateRing::has_free() const {
  return std::ranges::any_of(slots_, [](const Slot& slot) { return slot.chunk < 0; });
}

/// Of a chunk that was read ahead, and that nobody asked for yet.
bool StateRing::is_copy(const Slot& slot) const {
  if (slot.chunk < 0 || slot.in_flight > 0) return false;
  const ChunkState& state = model_.chunks[slot.chunk];
  return state.residency == Residency::staged && !state.pending && state.guess == Guess::none;
}

bool StateRing::drop_a_copy() {
  const auto copy = std::find_if(slots_.rbegin(), slots_.rend(),
                                 [&](const Slot& slot) REQUIRES(engine_mutex) { return is_copy(slot); });
  if (copy == slots_.rend()) return false;
  release(*copy);
  return true;
}

void StateRing::read(int32_t chunk) {
  if (!setup_.touches_nvme(chunk)) throw std::logic_error("a chunk wholly on the host was to be read");
  const auto free = std::ranges::find_if(slots_, [](const Slot& slot) { return slot.chunk < 0; });
  if (free == slots_.end()) throw std::logic_error("a chunk was to be read, and no slot of the ring is free");
  Slot& slot = *free;
  ChunkState& state = model_.chunks[chunk];
  state.become(Residency::reading);
  state.slot = slot.index;
  slot.chunk = chunk;
  slot.in_flight = 1;  // this function's own
  core_.journal.note(Happening::reading, setup_.layout.chunks[chunk].unit, chunk, slot.index);
  int64_t offset = 0;
  for (Component component : kAllComponents) {
    if (!setup_.in_store(chunk, component)) continue;
    const int64_t bytes = setup_.component_bytes(chunk, component);
    const auto i = static_cast<size_t>(component);
    io::Transfer& transfer = slot.transfers[i];
    transfer.memory = slot.memory + offset;
    if (component == Component::hi) state.staged_weights = transfer.memory;
    offset += bytes;
    if (state.extents[i].empty()) {  // never written: the worker clears it, without the mutex
      slot.states[i].start(transfer.memory, bytes);
      continue;
    }
    transfer.kind = io::Transfer::Kind::read;
    transfer.priority = state.pending ? io::Transfer::Priority::demand : io::Transfer::Priority::prefetch;
    transfer.extent = state.extents[i];
    if (component != Component::hi) slot.states[i].expect(transfer);
    ++slot.in_flight;
    core_.store.submit(transfer);
  }
  if (state.pending) read_gradient(chunk);
  moved(slot);
}

void StateRing::read_gradient(int32_t chunk) {
  if (!setup_.plan.gradients_on_nvme[chunk]) return;
  Slot& slot = of(chunk);
  slot.gradient.kind = io::Transfer::Kind::read;
  slot.gradient.priority = io::Transfer::Priority::demand;
  slot.gradient.extent = model_.chunks[chunk].gradient_extent;
  slot.gradient.memory = slot.memory + components_bytes(chunk);
  ++slot.in_flight;
  core_.store.submit(slot.gradient);
}

void StateRing::write(int32_t chunk, const Extents& fresh) {
  Slot& slot = of(chunk);
  model_.chunks[chunk].become(Residency::writing);
  core_.journal.note(Happening::writing, setup_.layout.chunks[chunk].unit, chunk, slot.index);
  slot.in_flight = 1;
  for (Component component : kAllComponents) {
    if (!setup_.in_store(chunk, component)) continue;
    io::Transfer& transfer = slot.transfers[static_cast<size_t>(component)];
    transfer.kind = io::Transfer::Kind::write;
    transfer.priority = io::Transfer::Priority::write_behind;
    transfer.extent = fresh[static_cast<size_t>(component)];
    if (component != Component::hi) slot.states[static_cast<size_t>(component)].hand_over(transfer);
    ++slot.in_flight;
    core_.store.submit(transfer);
  }
  moved(slot);
}

void StateRing::on_transfer(io::Transfer& transfer) noexcept {
  Slot& slot = *static_cast<Slot*>(transfer.context);
  StateRing& self = *slot.ring;
  const MutexLock guard(self.core_.mutex());
  self.core_.store.completed(transfer);
  if (transfer.error) {
    self.core_.fail(fmt::format("states of {}: {}",
                                self.setup_.layout.units[self.setup_.layout.chunks[slot.chunk].unit].name,
                                transfer.error->message()));
  }
  self.moved(slot);
  self.user_.pump();
}

void StateRing::lend(int32_t chunk) {
  ++of(chunk).in_flight;
}

void StateRing::returned(int32_t chunk) {
  moved(of(chunk));
  user_.pump();
}

/// One of the slot's transfers or copies is done; the last one moves the chunk on.
void StateRing::moved(Slot& slot) {
  if (--slot.in_flight > 0) return;
  ChunkState& state = model_.chunks[slot.chunk];
  if (state.residency == Residency::reading) {
    state.become(Residency::staged);
    core_.journal.note(Happening::staged, setup_.layout.chunks[slot.chunk].unit, slot.chunk, slot.index);
  } else if (state.residency == Residency::writing) {
    ends_writing(slot);
  }
  core_.changed.notify_all();
}

/// The old version goes only now that the new one is complete; a failed write leaves the old one in place.
void StateRing::ends_writing(Slot& slot) {
  const int32_t chunk = slot.chunk;
  for (Component component : kAllComponents) {
    const auto i = static_cast<size_t>(component);
    if (setup_.in_store(chunk, component) && core_.failure.empty())
      model_.chunks[chunk].guessed_extents[i] = slot.transfers[i].extent;
  }
  core_.journal.note(Happening::written, setup_.layout.chunks[chunk].unit, chunk, slot.index);
  release(slot);
  user_.written(chunk);
}

void StateRing::release(int32_t chunk) {
  release(of(chunk));
}

void StateRing::release(Slot& slot) {
  ChunkState& state = model_.chunks[slot.chunk];
  state.become(Residency::home);
  state.slot = -1;
  state.staged_weights = nullptr;
  slot.chunk = -1;
  slot.gradient.memory = nullptr;
  if (setup_.config.poison) std::memset(slot.memory, 0xFF, static_cast<size_t>(setup_.plan.ring_slot_bytes));
}

void StateRing::release_all() {
  for (Slot& slot : slots_) {
    if (slot.chunk >= 0) release(slot);
  }
}

bool StateRing::ready(int32_t chunk) const {
  return model_.chunks[chunk].residency == Residency::staged && of(chunk).in_flight == 0;
}

bool StateRing::at_rest() const {
  return std::ranges::all_of(slots_, [&](const Slot& slot) REQUIRES(engine_mutex) {
    return slot.chunk < 0 ||
           (slot.in_flight == 0 && model_.chunks[slot.chunk].residency == Residency::staged);
  });
}

std::span<std::byte> StateRing::memory(int32_t chunk, Component component) {
  return {of(chunk).transfers[static_cast<size_t>(component)].memory,
          static_cast<size_t>(setup_.component_bytes(chunk, component))};
}

}  // namespace overspill::engine
