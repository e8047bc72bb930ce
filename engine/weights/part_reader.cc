#include "engine/weights/part_reader.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "engine/weights/gather.h"

namespace overspill::engine {

PartReader::PartReader(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model,
                       Gatherer& gatherer)
    : setup_(setup),
      core_(core),
      model_(model),
      gatherer_(gatherer),
      memory_(hardware.host_budget, setup.plan.part_chunks * setup.plan.part_chunk_bytes,
              "weights read in parts"),
      slots_(static_cast<size_t>(setup.plan.part_chunks)) {
  if (memory_.bytes() > 0) core.store->register_memory(memory_.span());
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.owner = this;
    slot.transfer.kind = io::Transfer::Kind::read;
    slot.transfer.memory = memory_.data() + static_cast<int64_t>(i) * setup.plan.part_chunk_bytes;
    slot.transfer.on_complete = &PartReader::on_read;
    slot.transfer.context = &slot;
  }
}

void PartReader::read(int32_t unit, int64_t begin, std::span<std::byte> to) {
  const Unit& u = setup_.layout.units[unit];
  const int64_t end = begin + std::ssize(to);
  if (begin < 0 || end > u.shard_bytes()) throw std::logic_error("a part is outside its unit's shard");
  const MutexLock turn(turn_);
  const MutexLock lock(core_.mutex());
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    const Chunk& chunk = setup_.layout.chunks[c];
    const int64_t chunk_begin = chunk.begin * u.element_bytes;
    const int64_t from = std::max(begin, chunk_begin);
    const int64_t until = std::min(end, chunk_begin + chunk.elements * u.element_bytes);
    if (from >= until) continue;
    ask_from(c);
    take(c, from - chunk_begin,
         to.subspan(static_cast<size_t>(from - begin), static_cast<size_t>(until - from)));
  }
}

void PartReader::forget() {
  for (Slot& slot : slots_) {
    wait_for(slot);
    slot.chunk = -1;
  }
}

/// The chunk, and those of its unit that follow, as far as there are slots.
void PartReader::ask_from(int32_t chunk) {
  const Unit& unit = setup_.layout.units[setup_.layout.chunks[chunk].unit];
  const int32_t end =
      std::min(unit.first_chunk + unit.chunk_count, chunk + static_cast<int32_t>(slots_.size()));
  for (int32_t c = chunk; c < end; ++c)
    ask(c, c == chunk ? io::Transfer::Priority::demand : io::Transfer::Priority::prefetch);
}

/// Nothing where the chunk is in memory, or where its slot is still being read into for another.
void PartReader::ask(int32_t chunk, io::Transfer::Priority priority) {
  Slot* const slot = slot_of(chunk);
  if (slot == nullptr || slot->chunk == chunk || slot->reading || gatherer_.in_memory(chunk)) return;
  slot->chunk = chunk;
  slot->reading = true;
  slot->transfer.priority = priority;
  slot->transfer.extent = model_.chunks[chunk].extents[0];
  core_.store.submit(slot->transfer);
}

void PartReader::take(int32_t chunk, int64_t begin, std::span<std::byte> to) {
  while (true) {
    core_.check();
    Slot* const slot = slot_of(chunk);
    if (slot != nullptr && slot->chunk == chunk) {
      wait_for(*slot);
      const std::byte* const from = slot->transfer.memory + begin;
      const Unlocked unlocked(core_.mutex());  // the slot stays, since this thread has the turn
      std::memcpy(to.data(), from, to.size());
      return;
    }
    if (gatherer_.copy_from_memory(chunk, begin, to)) return;
    if (slot == nullptr) throw std::logic_error("the plan has no room for weights read in parts");
    wait_for(*slot);
    ask(chunk, io::Transfer::Priority::demand);
  }
}

void PartReader::wait_for(Slot& slot) {
  const int32_t unit = slot.chunk >= 0 ? setup_.layout.chunks[slot.chunk].unit : -1;
  core_.wait([&]() REQUIRES(engine_mutex) { return !slot.reading; }, Cause::reads, unit);
}

void PartReader::on_read(io::Transfer& transfer) noexcept {
  Slot& slot = *static_cast<Slot*>(transfer.context);
  Core& core = slot.owner->core_;
  const MutexLock guard(core.mutex());
  core.store.completed(transfer);
  slot.reading = false;
  if (transfer.error) {
    const int32_t unit = slot.owner->setup_.layout.chunks[slot.chunk].unit;
    return core.fail("reading weights of " + slot.owner->setup_.layout.units[unit].name + ": " +
                     transfer.error->message());
  }
  core.changed.notify_all();
}

}  // namespace overspill::engine
