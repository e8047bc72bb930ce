// Blocks of gathered units (gather.h): which are taken and given up, so that there is room in the arenas.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "engine/weights/gather.h"
#include "kernels/device_kernels.h"

namespace overspill::engine {
Block* Gatherer::take_block(int32_t unit, Urgency urgency) {
  const int64_t bytes = setup_.layout.units[unit].bytes();
  const bool on_device = !hardware_.device().shares_host_memory();
  const int64_t bytes_on_host = host_bytes(unit);
  const bool on_host = bytes_on_host > 0;
  const int64_t arena = on_device ? setup_.plan.gather_device_bytes : setup_.plan.gather_host_bytes;
  // Large and small units start from different ends: small ones that stay long do not cut up the room that
  // large ones need.
  const auto end = bytes * 4 > arena ? RangeAllocator::End::low : RangeAllocator::End::high;
  std::optional<int64_t> host;
  std::optional<int64_t> device;
  while (true) {
    if (on_host && !host) host = host_room(bytes_on_host, end);
    if (on_device && !device) device = device_arena_.allocate(bytes, end);
    if ((host || !on_host) && (device || !on_device)) break;
    // Who demands host memory waits for copies that will free some, before anything is given up.
    const bool waits = on_host && !host && urgency == Urgency::demanded && copy_under_way();
    if (!waits && make_room(unit, urgency)) continue;
    if (host) host_arena_.release(*host);
    if (device) device_arena_.release(*device);
    return nullptr;
  }
  if (idle_blocks_.empty()) {
    blocks_.push_back(std::make_unique<Block>());
    idle_blocks_.push_back(blocks_.back().get());
  }
  Block* block = idle_blocks_.back();
  idle_blocks_.pop_back();
  *block = Block{};
  block->unit = unit;
  if (host) {
    block->host_offset = *host;
    block->host = host_memory_.data() + *host;
    block->shard = block->host;
    if (meets_on_host(setup_.layout, setup_.traits))
      block->shard += setup_.layout.shard * setup_.layout.units[unit].shard_bytes();
  }
  if (device) {
    block->device_offset = *device;
    block->device = device_memory_.data() + *device;
  }
  return block;
}

/// The ready, unleased unit that is needed last, unless (ahead) it is needed sooner than `unit`; -1: none.
int32_t Gatherer::victim_for(int32_t unit, Urgency urgency) const {
  int32_t victim = -1;
  int64_t farthest = urgency == Urgency::demanded ? -1 : trace_.next_use(unit);
  for (const auto& block : blocks_) {
    if (block->unit < 0 || block->orphan || block->leases > 0 || block->pins > 0) continue;
    if (demand_.awaits(block->unit)) continue;  // it came for a caller who has yet to wake up
    if (model_.units[block->unit].gathered != Gathered::ready) continue;
    if (urgency == Urgency::ahead && keeps_bounce(*block) && !block->copied.done()) continue;
    const int64_t use = trace_.next_use(block->unit);
    if (use <= farthest) continue;
    farthest = use;
    victim = block->unit;
  }
  return victim;
}

/// Gives a unit up. Not where it is still being copied to the device: who demands waits for that and asks
/// again.
bool Gatherer::make_room(int32_t unit, Urgency urgency) {
  const int32_t victim = victim_for(unit, urgency);
  if (victim < 0) return false;
  Block& block = *model_.units[victim].block;
  if (keeps_bounce(block) && !block.copied.done()) return false;
  drop(block);
  return true;
}

/// Its copy to the device is done. With `poison`, which is for tests, it waits for the device.
void Gatherer::drop(Block& block) {
  // What is copied here next comes after the uses: nobody has to wait for them.
  for (const kernels::Event& use : block.uses) {
    if (setup_.config.poison) use.wait();
    stream_->wait(use);
  }
  block.uses.clear();
  const int64_t bytes = setup_.layout.units[block.unit].bytes();
  if (!block.orphan) {
    model_.units[block.unit].gathered = Gathered::absent;
    model_.units[block.unit].block = nullptr;
  }
  if (setup_.config.poison) {
    if (block.host != nullptr) std::memset(block.host, 0xFF, static_cast<size_t>(host_bytes(block.unit)));
    if (block.device_offset >= 0) hardware_.device().poison(block.device, bytes);
  }
  if (block.host_offset >= 0) host_arena_.release(block.host_offset);
  if (block.device_offset >= 0) device_arena_.release(block.device_offset);
  core_.journal.note(Happening::freed, block.unit);
  block.unit = -1;
  block.orphan = false;
  idle_blocks_.push_back(&block);
}

}  // namespace overspill::engine
