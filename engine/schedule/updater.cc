#include "engine/schedule/updater.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cpu_optim/update.h"

namespace overspill::engine {
void update_chunk(const Unit& unit, const Chunk& chunk, const UnitState& state, const ChunkMemory& memory,
                  const std::byte* gradients, int64_t gradient_element_bytes) {
  const auto& [hi, lo, m, v] = memory.component;
  std::vector<std::byte*> components{hi, lo, m, v};
  if (unit.format == Format::fp32) components = {hi, m, v};
  const auto format = unit.format == Format::fp32 ? optim::Format::fp32 : optim::Format::exact;
  const auto element = gradient_element_bytes == 2 ? optim::Element::bf16 : optim::Element::fp32;
  const optim::Piece piece{.components = components, .elements = chunk.elements};
  for (const Run& run : chunk.runs) {
    if (state.updated[run.segment] == 0) continue;
    optim::update(format, piece, {gradients, element}, {run.begin, run.begin + run.elements},
                  state.factors[run.segment]);
  }
}

Updater::Updater(Context& context, Gatherer& gatherer)
    : context_(context),
      gatherer_(gatherer),
      memory_(context.host_budget, context.plan.ring_slots * context.plan.ring_slot_bytes,
              "the ring of states"),
      slots_(static_cast<size_t>(context.plan.ring_slots)) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.owner = this;
    slot.index = static_cast<int32_t>(i);
    slot.memory = memory_.data() + static_cast<int64_t>(i) * context.plan.ring_slot_bytes;
    for (io::Transfer& transfer : slot.transfers) {
      transfer.on_complete = &Updater::on_transfer;
      transfer.context = &slot;
    }
  }
  if (memory_.bytes() > 0) context.store().register_memory(memory_.span());
  resume();
}

void Updater::schedule(std::span<const int32_t> chunks) {
  ring_queue_.clear();
  resident_queue_.clear();
  ahead_.clear();
  next_staged_ = next_resident_ = next_ahead_ = 0;
  int64_t position = 0;
  for (int32_t chunk : chunks) {
    ChunkState& state = context_.chunks[chunk];
    state.pending = true;
    state.position = position++;
    ++context_.units[context_.layout.chunks[chunk].unit].pending_chunks;
    ++pending_;
    (context_.touches_nvme(chunk) ? ring_queue_ : resident_queue_).push_back(chunk);
    context_.journal.note(Happening::scheduled, context_.layout.chunks[chunk].unit, chunk);
  }
  ahead_ = ring_queue_;
  resume();
  pump();
}

void Updater::pump() {
  if (!context_.failure.empty()) return;
  while (stage_next() || dispatch_next()) {
  }
}

// ---- reading

bool Updater::stage_next() {
  const int32_t chunk = next_to_stage();
  if (chunk < 0) return false;
  Slot* slot = take_slot(context_.chunks[chunk].pending);
  if (slot == nullptr) return false;
  stage(chunk, *slot);
  return true;
}

/// What somebody waits for first, then the order of the update, then what the next step will need first.
int32_t Updater::next_to_stage() {
  const auto wanted = [&](int32_t c) {
    const ChunkState& state = context_.chunks[c];
    return state.pending && state.residency == Residency::home && context_.touches_nvme(c);
  };
  if (context_.demanded_unit >= 0) {
    const Unit& unit = context_.layout.units[context_.demanded_unit];
    for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      if (wanted(c)) return c;
    }
  }
  while (next_staged_ < ring_queue_.size() && !wanted(ring_queue_[next_staged_])) {
    // A chunk whose last version is still on its way out is not home yet: it is staged when it is, in its
    // turn.
    if (context_.chunks[ring_queue_[next_staged_]].residency == Residency::writing &&
        context_.chunks[ring_queue_[next_staged_]].pending) {
      return -1;
    }
    ++next_staged_;
  }
  if (next_staged_ < ring_queue_.size()) return ring_queue_[next_staged_];
  return next_ahead();
}

int32_t Updater::next_ahead() {
  if (!ahead_allowed_ || next_ahead_ == ahead_.size()) return -1;
  const ChunkState& state = context_.chunks[ahead_[next_ahead_]];
  if (state.pending || state.residency != Residency::home) return -1;
  const bool room =
      std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.chunk < 0; });
  return room ? ahead_[next_ahead_++] : -1;
}

Updater::Slot* Updater::take_slot(bool may_drop_copies) {
  Slot* copy = nullptr;
  for (Slot& slot : slots_) {
    if (slot.chunk < 0) return &slot;
    const ChunkState& state = context_.chunks[slot.chunk];
    if (state.residency == Residency::staged && !state.pending) copy = &slot;
  }
  if (copy == nullptr || !may_drop_copies) return nullptr;
  free_slot(*copy);
  return copy;
}

void Updater::stage(int32_t chunk, Slot& slot) {
  ChunkState& state = context_.chunks[chunk];
  state.become(Residency::reading);
  state.slot = slot.index;
  slot.chunk = chunk;
  slot.in_flight = 1;  // this function's own
  context_.journal.note(Happening::reading, context_.layout.chunks[chunk].unit, chunk, slot.index);
  int64_t offset = 0;
  for (Component component : kAllComponents) {
    if (!context_.in_store(chunk, component)) continue;
    const int64_t bytes = context_.component_bytes(chunk, component);
    const auto i = static_cast<size_t>(component);
    io::Transfer& transfer = slot.transfers[i];
    transfer.memory = slot.memory + offset;
    if (component == Component::hi) state.staged_weights = transfer.memory;
    offset += bytes;
    if (state.extents[i].empty()) {  // never written
      std::memset(transfer.memory, 0, static_cast<size_t>(bytes));
      continue;
    }
    transfer.kind = io::Transfer::Kind::read;
    transfer.priority = state.pending ? io::Transfer::Priority::demand : io::Transfer::Priority::prefetch;
    transfer.extent = state.extents[i];
    transfer.error.reset();
    ++slot.in_flight;
    context_.store().submit(transfer);
  }
  if (offset > context_.plan.ring_slot_bytes)
    throw std::logic_error("a chunk is larger than a slot of the ring");
  transferred(slot);
}

void Updater::on_transfer(io::Transfer& transfer) noexcept {
  Slot& slot = *static_cast<Slot*>(transfer.context);
  Updater& self = *slot.owner;
  const std::lock_guard guard(self.context_.mutex);
  if (transfer.error) {
    self.context_.fail(fmt::format(
        "states of {}: {}", self.context_.layout.units[self.context_.layout.chunks[slot.chunk].unit].name,
        transfer.error->message()));
  }
  self.transferred(slot);
  self.pump();
}

/// One of the slot's transfers is done; the last one moves the chunk on.
void Updater::transferred(Slot& slot) {
  if (--slot.in_flight > 0) return;
  const int32_t chunk = slot.chunk;
  const int32_t unit = context_.layout.chunks[chunk].unit;
  ChunkState& state = context_.chunks[chunk];
  if (state.residency == Residency::reading) {
    state.become(Residency::staged);
    context_.journal.note(Happening::staged, unit, chunk, slot.index);
  } else {
    for (Component component : kAllComponents) {
      const auto i = static_cast<size_t>(component);
      if (!context_.in_store(chunk, component)) continue;
      // The old version goes only now that the new one is complete; a failed write leaves the old one in
      // place.
      if (!context_.failure.empty()) continue;
      if (!state.extents[i].empty()) context_.store().release(state.extents[i]);
      state.extents[i] = slot.transfers[i].extent;
    }
    context_.journal.note(Happening::written, unit, chunk, slot.index);
    free_slot(slot);
  }
  context_.changed.notify_all();
}

void Updater::free_slot(Slot& slot) {
  ChunkState& state = context_.chunks[slot.chunk];
  state.become(Residency::home);
  state.slot = -1;
  state.staged_weights = nullptr;
  slot.chunk = -1;
  if (context_.config.poison)
    std::memset(slot.memory, 0xFF, static_cast<size_t>(context_.plan.ring_slot_bytes));
}

// ---- updating

bool Updater::dispatch_next() {
  // A few more than workers, so that none waits for the lock; few enough that what is demanded is not queued
  // behind them.
  if (running_ > context_.resources.executor->threads()) return false;
  while (next_resident_ < resident_queue_.size() && !is_ready(resident_queue_[next_resident_]))
    ++next_resident_;
  const int32_t chunk = next_ready();
  if (chunk < 0) return false;
  dispatch(chunk);
  return true;
}

bool Updater::is_ready(int32_t chunk) const {
  const ChunkState& state = context_.chunks[chunk];
  if (!state.pending) return false;
  return state.residency == (context_.touches_nvme(chunk) ? Residency::staged : Residency::home);
}

int32_t Updater::next_ready() const {
  if (context_.demanded_unit >= 0) {
    const Unit& unit = context_.layout.units[context_.demanded_unit];
    for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      if (is_ready(c)) return c;
    }
  }
  int32_t best = next_resident_ < resident_queue_.size() ? resident_queue_[next_resident_] : -1;
  for (const Slot& slot : slots_) {
    if (slot.chunk < 0 || !is_ready(slot.chunk)) continue;
    if (best < 0 || context_.chunks[slot.chunk].position < context_.chunks[best].position) best = slot.chunk;
  }
  return best;
}

void Updater::dispatch(int32_t chunk) {
  context_.chunks[chunk].become(Residency::updating);
  context_.journal.note(Happening::updating, context_.layout.chunks[chunk].unit, chunk,
                        context_.chunks[chunk].slot);
  ++running_;
  context_.resources.executor->submit([this, chunk] { run(chunk); });
}

void Updater::run(int32_t chunk) noexcept {
  const Chunk& c = context_.layout.chunks[chunk];
  const Unit& unit = context_.layout.units[c.unit];
  ChunkMemory memory;
  std::byte* gradients = nullptr;
  const int64_t gradient_bytes = gradient_element_bytes(unit.format, context_.config.gradient_accumulation);
  {
    const std::lock_guard guard(context_.mutex);
    const ChunkState& state = context_.chunks[chunk];
    memory.component = state.home;
    for (Component component : kAllComponents) {
      const auto i = static_cast<size_t>(component);
      if (context_.in_store(chunk, component)) memory.component[i] = slots_[state.slot].transfers[i].memory;
    }
    gradients = context_.units[c.unit].gradients + context_.layout.global_begin(c) * gradient_bytes;
  }
  std::string failure;
  try {
    update_chunk(unit, c, context_.units[c.unit], memory, gradients, gradient_bytes);
  } catch (const std::exception& error) {
    failure = fmt::format("updating {}: {}", unit.name, error.what());
  }
  if (context_.config.poison) std::memset(gradients, 0xFF, static_cast<size_t>(c.elements * gradient_bytes));
  const std::lock_guard guard(context_.mutex);
  --running_;
  if (!failure.empty()) return context_.fail(failure);
  try {
    gatherer_.deliver(chunk, memory.component[0]);
    updated(chunk);
    pump();
  } catch (const std::exception& error) {
    context_.fail(fmt::format("updating {}: {}", unit.name, error.what()));
  }
}

void Updater::updated(int32_t chunk) {
  ChunkState& state = context_.chunks[chunk];
  const int32_t unit = context_.layout.chunks[chunk].unit;
  state.pending = false;
  --pending_;
  ++context_.stats.updates;
  context_.journal.note(Happening::updated, unit, chunk, state.slot);
  if (--context_.units[unit].pending_chunks == 0 && context_.demanded_unit == unit)
    context_.demanded_unit = -1;
  if (state.slot >= 0) {
    write_back(chunk, slots_[state.slot]);
  } else {
    state.become(Residency::home);
  }
  context_.changed.notify_all();
}

void Updater::write_back(int32_t chunk, Slot& slot) {
  context_.chunks[chunk].become(Residency::writing);
  context_.journal.note(Happening::writing, context_.layout.chunks[chunk].unit, chunk, slot.index);
  slot.in_flight = 1;
  for (Component component : kAllComponents) {
    if (!context_.in_store(chunk, component)) continue;
    const int64_t bytes = context_.component_bytes(chunk, component);
    io::Transfer& transfer = slot.transfers[static_cast<size_t>(component)];
    transfer.kind = io::Transfer::Kind::write;
    transfer.priority = io::Transfer::Priority::write_behind;
    transfer.extent = context_.store().allocate(bytes);
    transfer.error.reset();
    ++slot.in_flight;
    context_.store().submit(transfer);
  }
  transferred(slot);
}

// ---- waiting

bool Updater::at_rest() const {
  return pending_ == 0 && running_ == 0 && std::all_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
           return slot.chunk < 0 || context_.chunks[slot.chunk].residency == Residency::staged;
         });
}

void Updater::finish(std::unique_lock<std::mutex>& lock) {
  pump();
  context_.wait(lock, [&] { return pending_ == 0; });
}

void Updater::quiesce(std::unique_lock<std::mutex>& lock) {
  ahead_allowed_ = false;
  pump();
  context_.wait(lock, [&] { return at_rest(); });
  for (Slot& slot : slots_) {
    if (slot.chunk >= 0) free_slot(slot);
  }
  next_ahead_ = 0;
}

}  // namespace overspill::engine
