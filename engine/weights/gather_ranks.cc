// Gathered units of several ranks (gather.h): what this rank serves to the others, and what comes from them.
#include <algorithm>

#include "engine/weights/gather.h"

namespace overspill::engine {

void Gatherer::acquire_whole(int32_t unit) {
  UnitState& state = model_.units[unit];
  core_.check();
  if (state.gathered == Gathered::ready) return;
  state.wanted = true;
  const Awaiting awaiting = await(unit);
  core_.wait([&]() REQUIRES(engine_mutex) { return state.gathered == Gathered::ready; }, Cause::reads, unit);
}

void Gatherer::want_whole(std::span<const int32_t> units) {
  for (int32_t unit : units) model_.units[unit].wanted = lies_whole(unit);
}

bool Gatherer::wants(int32_t unit) const {
  const UnitState& state = model_.units[unit];
  if (state.gathered != Gathered::local) return false;
  if (lies_whole(unit)) return state.wanted && state.pending_chunks == 0;
  return !collects_on_device() || state.block->copied.done();
}

const std::byte* Gatherer::shard_in_memory(int32_t unit) const {
  const UnitState& state = model_.units[unit];
  if (state.pending_chunks > 0) return nullptr;
  if (setup_.lives_on_device(unit)) {
    if (!state.on_device->copied.done()) return nullptr;
    state.on_device->copied.wait();  // throws what went wrong
    return state.on_device->device;
  }
  if (state.home != nullptr) return state.home;
  if (state.block != nullptr && state.gathered != Gathered::filling && state.block->shard != nullptr)
    return state.block->shard;
  return serve_.unit == unit && serve_.arriving == 0 ? serve_.shard : nullptr;
}

const std::byte* Gatherer::pin_shard(int32_t unit) {
  const std::byte* shard = shard_in_memory(unit);
  Block* block = model_.units[unit].block;
  if (shard != nullptr && block != nullptr && shard == block->shard) {
    ++block->pins;
    pinned_.push_back(block);
  }
  return shard;
}

void Gatherer::unpin_all_but(std::span<const int32_t> units) {
  const size_t pinned = pinned_.size();
  std::erase_if(pinned_, [&](Block* block) REQUIRES(engine_mutex) {
    if (std::find(units.begin(), units.end(), block->unit) != units.end()) return false;
    --block->pins;
    return true;
  });
  if (pinned_.size() < pinned) core_.changed.notify_all();  // there may be room now
}

void Gatherer::prepare_to_serve(int32_t unit) {
  const UnitState& state = model_.units[unit];
  if (state.pending_chunks > 0) {
    if (demand_.updates.empty()) demand_.want_updates(unit);
    return;
  }
  if (setup_.lives_on_device(unit)) return;  // it is being updated where it is
  const bool busy = serve_.unit >= 0 && (serve_.arriving > 0 || serve_.pins > 0 || !after_serve_.empty());
  if (busy || state.gathered == Gathered::filling || shard_in_memory(unit) != nullptr) return;
  const Unit& layout = setup_.layout.units[unit];
  serve_ = Block{};
  serve_.unit = unit;
  serve_.shard = serve_memory_.data();
  serve_.arriving = layout.chunk_count + 1;
  for (int32_t c = layout.first_chunk; c < layout.first_chunk + layout.chunk_count; ++c)
    bring(serve_, c, Urgency::demanded);
  arrived(serve_);
  make_copies();
}

std::byte* Gatherer::begin_collecting(int32_t unit) {
  UnitState& state = model_.units[unit];
  state.gathered = Gathered::collecting;
  if (lies_whole(unit)) return state.whole;
  if (!collects_on_device()) return state.block->host;
  state.block->copied.wait();  // it is done; throws what went wrong
  return state.block->device;
}

void Gatherer::collected(int32_t unit) {
  UnitState& state = model_.units[unit];
  if (lies_whole(unit)) {
    state.gathered = Gathered::ready;
    state.wanted = false;
    core_.journal.note(Happening::gathered, unit);
  } else {
    if (!collects_on_device()) to_device(*state.block);
    finish(*state.block);
  }
  core_.changed.notify_all();
}

}  // namespace overspill::engine
