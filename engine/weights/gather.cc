#include "engine/weights/gather.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/device_kernels.h"

namespace overspill::engine {
namespace {

constexpr int64_t kBlockAlign = 4096;

}  // namespace

Gatherer::Gatherer(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, Demand& demand)
    : setup_(setup),
      core_(core),
      hardware_(hardware),
      model_(model),
      demand_(demand),
      trace_(static_cast<int32_t>(setup.layout.units.size())),
      host_memory_(hardware.device(), hardware.host_budget, setup.plan.gather_host_bytes, "gathered units"),
      host_arena_(setup.plan.gather_host_bytes, kBlockAlign),
      device_arena_(setup.plan.gather_device_bytes, kBlockAlign),
      fetches_(model.chunks.size()),
      serve_memory_(hardware.device(), hardware.host_budget, setup.plan.serve_bytes,
                    "shards on their way to other ranks"),
      serve_fetches_(setup.plan.serve_bytes > 0 ? model.chunks.size() : 0),
      parts_(setup, core, hardware, model, *this) {
  if (!hardware.device().shares_host_memory()) {
    device_memory_ = hardware.device().allocate(setup.plan.gather_device_bytes);
    stream_ = hardware.device().make_stream();
    looks_ = hardware.device().make_stream();
  }
  if (core.store.exists() && host_memory_.bytes() > 0) core.store->register_memory(host_memory_.span());
  if (serve_memory_.bytes() > 0) core.store->register_memory(serve_memory_.span());
  copies_.reserve(model.chunks.size());
  after_serve_.reserve(serve_fetches_.size());
  for (auto* fetches : {&fetches_, &serve_fetches_}) {
    for (size_t c = 0; c < fetches->size(); ++c) {
      Fetch& fetch = (*fetches)[c];
      fetch.owner = this;
      fetch.chunk = static_cast<int32_t>(c);
      fetch.transfer.on_complete = &Gatherer::on_fetched;
      fetch.transfer.context = &fetch;
    }
  }
}

Gatherer::~Gatherer() {
  if (stream_ == nullptr) return;
  try {
    for (const auto& block : blocks_) {
      for (const kernels::Event& use : block->uses) stream_->wait(use);
    }
    stream_->record().wait();
  } catch (const std::exception&) {  // the device has failed: nothing uses its memory any more
  }
}

/// While it lives, a caller waits until there may be room.
class Gatherer::WaitingForRoom {
 public:
  explicit WaitingForRoom(Gatherer& gatherer) REQUIRES(engine_mutex) : gatherer_(gatherer) {
    ++gatherer_.waiting_for_room_;
  }
  ~WaitingForRoom() REQUIRES(engine_mutex) { --gatherer_.waiting_for_room_; }
  WaitingForRoom(const WaitingForRoom&) = delete;
  WaitingForRoom& operator=(const WaitingForRoom&) = delete;

 private:
  Gatherer& gatherer_;
};

Block* Gatherer::acquire(int32_t unit) {
  UnitState& state = model_.units[unit];
  bool announced = false;
  while (true) {
    core_.check();
    if (state.gathered == Gathered::ready) break;
    // Asked before the fill: a copy that ends while the fill looks for room leaves room that the fill did not
    // see.
    const std::optional<kernels::Event> copied =
        state.gathered == Gathered::absent ? copy_under_way() : std::nullopt;
    if (state.gathered == Gathered::absent && !start_fill(unit, Urgency::demanded)) {
      if (copied) {  // its end makes room
        core_.wait_for(*copied);
        continue;
      }
      if (!filling_anything()) {
        const bool on_device = !hardware_.device().shares_host_memory();
        throw BudgetError(fmt::format(
            "no room to gather {}: it needs {} bytes, the arena's largest free run has {}. Leased now: {}. "
            "Drop views of parameters that are kept, or raise the {} budget",
            setup_.layout.units[unit].name, setup_.layout.units[unit].bytes(),
            (on_device ? device_arena_ : host_arena_).largest_free_run(), leased_units(),
            on_device ? "device" : "host"));
      }
      const WaitingForRoom waiting(*this);
      core_.wait(
          [&]() REQUIRES(engine_mutex) {
            const bool room = setup_.traits.shares_host_memory && victim_for(unit, Urgency::demanded) >= 0;
            return room || state.gathered != Gathered::absent || !filling_anything();
          },
          Cause::room, unit);
      continue;
    }
    const Awaiting awaiting = await(unit);  // from now on nobody takes the unit's room
    if (!announced) start_fills_ahead();
    announced = true;
    make_copies();
    core_.wait(
        [&]() REQUIRES(engine_mutex) {
          return state.gathered == Gathered::ready || state.gathered == Gathered::absent || may_copy_served();
        },
        state.pending_chunks > 0 ? Cause::updates : Cause::reads, unit);
  }
  Block* block = state.block;
  ++block->leases;
  if (waiting_for_room_ > 0) core_.changed.notify_all();  // the unit is leased now, and no longer awaited
  try {
    if (!announced) prefetch();
  } catch (...) {
    release(block, {});
    throw;
  }
  return block;
}

void Gatherer::wait_for_copy(Block& block) {
  const MutexLock lock(core_.mutex());
  core_.wait_for(kernels::Event(block.copied));
  free_bounce(block);
}

kernels::Event Gatherer::use(Block* block, kernels::Stream& queue) {
  if (std::find(block->users.begin(), block->users.end(), &queue) == block->users.end())
    block->users.push_back(&queue);
  if (!block->copied.done()) return block->copied;
  block->copied.wait();  // throws what went wrong
  free_bounce(*block);
  return {};
}

void Gatherer::release(Block* block, std::span<const kernels::Event> uses) noexcept {
  const int32_t unit = block->unit;
  try {
    if (--block->leases == 0) block->users.clear();
    std::erase_if(block->uses, [](const kernels::Event& use) { return use.done(); });
    // Where the device shares the host's memory, work is done when it is submitted: there is no use to wait
    // for.
    if (stream_ != nullptr) block->uses.insert(block->uses.end(), uses.begin(), uses.end());
    if (block->leases == 0 && block->orphan) drop(*block);
  } catch (const std::exception& error) {
    core_.fail(fmt::format("ending a lease of {} failed: {}", setup_.layout.units[unit].name, error.what()));
  }
  core_.changed.notify_all();
}

/// Gives the host memory back that a unit passed through on its way to the device.
void Gatherer::free_bounce(Block& block) {
  if (block.device_offset < 0 || block.host_offset < 0 || block.pins > 0) return;
  host_arena_.release(block.host_offset);
  block.host_offset = -1;
  block.host = nullptr;
  block.shard = nullptr;
}

/// A unit is on the device, or on its way, and has not given back the host memory that it passes through.
bool Gatherer::keeps_bounce(const Block& block) const {
  return block.unit >= 0 && block.device_offset >= 0 && block.host_offset >= 0 &&
         (block.orphan || model_.units[block.unit].gathered == Gathered::ready);
}

/// Of the host arena. What units passed through on their way to the device is given back first.
std::optional<int64_t> Gatherer::host_room(int64_t bytes, RangeAllocator::End end) {
  std::optional<int64_t> room = host_arena_.allocate(bytes, end);
  for (const auto& block : blocks_) {
    if (room) break;
    if (!keeps_bounce(*block) || !block->copied.done()) continue;
    free_bounce(*block);
    room = host_arena_.allocate(bytes, end);
  }
  return room;
}

/// To the device, of a unit whose host memory, or the unit itself, is then given up by who needs the room.
std::optional<kernels::Event> Gatherer::copy_under_way() const {
  for (const auto& block : blocks_) {
    if (keeps_bounce(*block) && block->pins == 0 && !block->copied.done()) return block->copied;
  }
  return std::nullopt;
}

void Gatherer::prefetch() {
  start_fills_ahead();
  make_copies();
}

void Gatherer::start_fills_ahead() {
  const int64_t ahead = setup_.config.prefetch_units;
  if (ahead == 0) return;
  int64_t place = 0;
  for (int32_t unit : trace_.upcoming(ahead + kUsesWithUpdates)) {
    const bool beyond = place++ >= ahead;
    const UnitState& state = model_.units[unit];
    if (setup_.used_in_place(unit) || state.gathered != Gathered::absent) continue;
    if (setup_.layout.units[unit].part_bytes > 0) continue;
    if (beyond && !waits_for_update_to_nvme(unit)) return;
    if (!start_fill(unit, Urgency::ahead)) return;
  }
}

/// Its weights would have to be read after the update has written them.
bool Gatherer::waits_for_update_to_nvme(int32_t unit) const {
  return model_.units[unit].pending_chunks > 0 && setup_.plan.weights_on_nvme[unit] &&
         setup_.traits.shares_host_memory;
}

/// make_copies() follows.
bool Gatherer::start_fill(int32_t unit, Urgency urgency) {
  Block* block = take_block(unit, urgency);
  if (block == nullptr) return false;
  UnitState& state = model_.units[unit];
  state.gathered = Gathered::filling;
  state.block = block;
  core_.journal.note(Happening::gathering, unit);
  ++core_.stats.gathers;
  const Unit& layout = setup_.layout.units[unit];
  block->arriving = layout.chunk_count + 1;  // the last one is this function's own
  for (int32_t c = layout.first_chunk; c < layout.first_chunk + layout.chunk_count; ++c) {
    if (!model_.chunks[c].pending) bring(*block, c, urgency);
  }
  arrived(*block);
  return true;
}

/// A chunk's newest weights where they are in memory; null when only the store has them.
const std::byte* Gatherer::weights_in_memory(int32_t chunk) const {
  const ChunkState& state = model_.chunks[chunk];
  if (state.home[0] != nullptr) return state.home[0];
  // What was never written is not in a staged slot either: its worker clears it there.
  const bool in_slot = (state.residency == Residency::staged && !state.extents[0].empty()) ||
                       (state.residency == Residency::writing && !state.writes_a_guess());
  return in_slot ? state.staged_weights : kept_for_others(chunk);
}

/// A chunk of the shard that was read to serve it to other ranks: a rank that is behind them needs it next.
const std::byte* Gatherer::kept_for_others(int32_t chunk) const {
  const bool kept = serve_.unit == setup_.layout.chunks[chunk].unit && serve_.arriving == 0;
  return kept ? place_of(serve_, chunk) : nullptr;
}

void Gatherer::bring(Block& block, int32_t chunk, Urgency urgency) {
  const bool in_store = weights_in_memory(chunk) == nullptr && !model_.chunks[chunk].extents[0].empty();
  if (in_store && &block != &serve_ && serve_.unit == block.unit && serve_.arriving > 0)
    return after_serve_.push_back({&block, chunk, urgency});  // it is being read for other ranks
  if (in_store) return fetch(block, chunk, urgency);
  if (block.shard == nullptr) return arrived(block);  // it is filled from the weights' home in one copy
  copies_.push_back({&block, chunk, urgency});
}

void Gatherer::fetch(Block& block, int32_t chunk, Urgency urgency) {
  Fetch& fetch = (&block == &serve_ ? serve_fetches_ : fetches_)[chunk];
  fetch.block = &block;
  fetch.transfer.kind = io::Transfer::Kind::read;
  fetch.transfer.priority =
      urgency == Urgency::demanded ? io::Transfer::Priority::demand : io::Transfer::Priority::prefetch;
  fetch.transfer.extent = model_.chunks[chunk].extents[0];
  fetch.transfer.memory = place_of(block, chunk);
  core_.store.submit(fetch.transfer);
}

/// Makes the copies that are due, on the thread of whoever calls.
void Gatherer::make_copies() {
  while (!copies_.empty()) make_next(copies_);
  copy_served();
}

void Gatherer::copy_served() {
  while (may_copy_served()) make_next(after_serve_);
}

void Gatherer::make_next(std::vector<Copy>& copies) {
  const Copy next = copies.front();
  copies.erase(copies.begin());
  make(next);
}

/// The block stays since it is being filled, the weights' home since whoever changes it invalidates the block
/// first, and a slot since it is lent.
void Gatherer::make(const Copy& copy) {
  const auto bytes = static_cast<size_t>(setup_.component_bytes(copy.chunk, Component::hi));
  if (!copy_from_memory(copy.chunk, 0, {place_of(*copy.block, copy.chunk), bytes}))  // its slot was given up
    return fetch(*copy.block, copy.chunk, copy.urgency);
  arrived(*copy.block);
}

bool Gatherer::copy_from_memory(int32_t chunk, int64_t begin, std::span<std::byte> to) {
  const ChunkState& state = model_.chunks[chunk];
  const std::byte* weights = weights_in_memory(chunk);
  if (weights == nullptr && !state.extents[0].empty()) return false;
  const bool from_slot = weights != nullptr && weights == state.staged_weights;
  const bool from_serve = weights != nullptr && weights == kept_for_others(chunk);
  if (from_slot) slots_->lend(chunk);
  if (from_serve) ++serve_.pins;
  {
    const Unlocked unlocked(core_.mutex());
    if (weights != nullptr) {
      std::memcpy(to.data(), weights + begin, to.size());
    } else {
      std::memset(to.data(), 0, to.size());  // never written
    }
  }
  if (from_slot) slots_->returned(chunk);
  if (from_serve && --serve_.pins == 0) core_.changed.notify_all();
  return true;
}

void Gatherer::on_fetched(io::Transfer& transfer) noexcept {
  Fetch& fetch = *static_cast<Fetch*>(transfer.context);
  Core& core = fetch.owner->core_;
  const MutexLock guard(core.mutex());
  core.store.completed(transfer);
  if (transfer.error) {
    core.fail("reading weights of " + fetch.owner->setup_.layout.units[fetch.block->unit].name + ": " +
              transfer.error->message());
    return;
  }
  fetch.owner->arrived(*fetch.block);
}

void Gatherer::deliver(int32_t chunk, const std::byte* weights) {
  const UnitState& state = model_.units[setup_.layout.chunks[chunk].unit];
  if (state.gathered != Gathered::filling) return;
  Block& block = *state.block;  // stays, since this chunk is yet to come
  if (block.shard != nullptr) {
    std::byte* const to = place_of(block, chunk);
    const Unlocked unlocked(core_.mutex());
    std::memcpy(to, weights, static_cast<size_t>(setup_.component_bytes(chunk, Component::hi)));
  }
  arrived(block);
}

void Gatherer::arrived(Block& block) {
  if (--block.arriving > 0) return;
  if (&block == &serve_) return core_.changed.notify_all();
  UnitState& state = model_.units[block.unit];
  state.gathered = Gathered::local;
  const bool alone = setup_.layout.shards == 1;
  if (alone || collects_on_device()) to_device(block);
  if (alone) finish(block);  // else the rounds collect the other shards
  core_.changed.notify_all();
}

/// From the shard that lives there, or of what is on the host: this rank's shard, or all of them where they
/// meet there.
void Gatherer::to_device(Block& block) {
  if (block.device_offset < 0) {
    block.device = block.host;
    return;
  }
  UnitState& state = model_.units[block.unit];
  const Unit& unit = setup_.layout.units[block.unit];
  if (Block* const living = state.on_device) {
    stream_->wait(living->copied);
    hardware_.device().kernels()->copy(*stream_, block.device + setup_.layout.shard * unit.shard_bytes(),
                                       living->device, unit.shard_bytes());
    block.copied = state.copied = stream_->record();
    std::erase_if(living->uses, [](const kernels::Event& use) { return use.done(); });
    living->uses.push_back(block.copied);  // its update waits for this
    return;
  }
  const bool whole = meets_on_host(setup_.layout, setup_.traits);
  const int64_t bytes = whole ? unit.bytes() : unit.shard_bytes();
  const std::byte* from = block.host != nullptr ? block.host : state.home;
  std::byte* to = block.device + (whole ? 0 : setup_.layout.shard * bytes);
  const kernels::Event begin = core_.journal.begin(*stream_);
  stream_->copy_from_host(to, from, bytes);
  block.copied = state.copied = stream_->record();
  core_.journal.note(DeviceSpan::Kind::copy_up, block.unit, begin, block.copied);
}

void Gatherer::finish(Block& block) {
  model_.units[block.unit].gathered = Gathered::ready;
  core_.journal.note(Happening::gathered, block.unit);
}

void Gatherer::copy_to_host(const Block& block, std::span<std::byte> to, const std::byte* from) {
  kernels::Event copied;
  {
    const MutexLock turn(looking_);
    {
      const MutexLock guard(core_.mutex());
      looks_->wait(block.copied);
    }
    looks_->copy_to_host(to.data(), from, std::ssize(to));
    copied = looks_->record();
  }
  copied.wait();
}

void Gatherer::invalidate(std::span<const int32_t> units) {
  make_copies();
  parts_.forget();
  if (serve_.unit >= 0) {
    core_.wait([&]() REQUIRES(engine_mutex) { return serve_.arriving == 0; }, Cause::reads);
    make_copies();
    core_.wait([&]() REQUIRES(engine_mutex) { return serve_.pins == 0; }, Cause::reads);
    serve_.unit = -1;
  }
  for (int32_t unit : units) {
    UnitState& state = model_.units[unit];
    if (lies_whole(unit)) {  // used in place, as with one rank
      state.gathered = Gathered::local;
      state.wanted = false;
      continue;
    }
    core_.wait(
        [&]() REQUIRES(engine_mutex) {
          return state.gathered != Gathered::filling && state.gathered != Gathered::collecting;
        },
        Cause::reads);
    // What it reads changes now, also where its block was given up.
    core_.wait_for(std::exchange(state.copied, {}));
    if (state.gathered == Gathered::absent) continue;
    Block& block = *state.block;
    if (block.leases == 0) {
      drop(block);
      continue;
    }
    block.orphan = true;
    state.gathered = Gathered::absent;
    state.block = nullptr;
  }
}

bool Gatherer::filling_anything() const {
  return std::any_of(blocks_.begin(), blocks_.end(), [&](const auto& block) REQUIRES(engine_mutex) {
    if (block->unit < 0 || block->orphan) return false;
    return block->pins > 0 || model_.units[block->unit].gathered != Gathered::ready ||
           demand_.awaits(block->unit);
  });
}

std::string Gatherer::leased_units() const {
  std::string names;
  for (const auto& block : blocks_) {
    if (block->unit < 0 || block->leases == 0) continue;
    const Unit& unit = setup_.layout.units[block->unit];
    names += fmt::format("{}{} ({} bytes)", names.empty() ? "" : ", ", unit.name, unit.bytes());
  }
  return names.empty() ? "nothing" : names;
}

}  // namespace overspill::engine
