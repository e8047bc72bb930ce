#include "engine/schedule/updater.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "io/checksum.h"

namespace overspill::engine {
namespace {

constexpr int64_t kCopiedElements = 16 * 1024;  // at a time: old and new states stay in the L2 cache

/// The order of the update; guesses come last.
bool earlier(const ChunkState& a, const ChunkState& b) {
  return a.pending != b.pending ? a.pending : a.position < b.position;
}

}  // namespace

void update_chunk(const Unit& unit, const Chunk& chunk, std::span<const optim::Factors> factors,
                  std::span<const uint8_t> present, const ChunkMemory& memory, optim::Gradient gradients,
                  optim::Range within) {
  const optim::Piece piece{.components = std::span(memory.component).first(unit.components().size()),
                           .elements = chunk.elements,
                           .index = memory.index,
                           .seed = memory.seed};
  for (const Run& run : chunk.runs) {
    const optim::Range range{std::max(run.begin, within.begin),
                             std::min(run.begin + run.elements, within.end)};
    if (present[run.segment] == 0 || range.begin >= range.end) continue;
    optim::update(*unit.format, piece, gradients, range, factors[run.segment]);
  }
}

Updater::Updater(Context& context, Gatherer& gatherer)
    : context_(context),
      gatherer_(gatherer),
      speculation_(context),
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
      slot.states.emplace_back(context.plan.ring_slot_bytes);
    }
    slot.gradient.on_complete = &Updater::on_transfer;
    slot.gradient.context = &slot;
  }
  if (memory_.bytes() > 0) context.store().register_memory(memory_.span());
  for (auto* queue :
       {&ring_queue_, &resident_queue_, &ahead_, &guesses_, &guessed_, &unread_guesses_, &home_guesses_})
    queue->reserve(context.chunks.size());
  gatherer.copies_from_slots_of(*this);
  check_slots();
  resume();
}

/// Before anything is read into a slot: what a read would write behind its end belongs to another chunk.
void Updater::check_slots() const {
  for (int32_t chunk = 0; chunk < std::ssize(context_.chunks); ++chunk) {
    const Unit& unit = context_.layout.units[context_.layout.chunks[chunk].unit];
    if (!unit.trainable() || !context_.touches_nvme(chunk)) continue;
    int64_t bytes = context_.plan.gradients_on_nvme[chunk] ? context_.gradient_bytes(chunk) : 0;
    for (Component component : kAllComponents)
      bytes += context_.in_store(chunk, component) ? context_.component_bytes(chunk, component) : 0;
    if (bytes <= context_.plan.ring_slot_bytes) continue;
    throw std::logic_error(fmt::format("chunk {} of {} takes {} bytes in a slot of the ring, which has {}",
                                       chunk - unit.first_chunk, unit.name, bytes,
                                       context_.plan.ring_slot_bytes));
  }
}

void Updater::schedule(std::span<const int32_t> chunks) {
  ring_queue_.clear();
  resident_queue_.clear();
  ahead_.clear();
  next_staged_ = next_resident_ = 0;
  const ScheduleStats before = context_.stats;
  int64_t position = 0;
  for (int32_t chunk : chunks) {
    ChunkState& state = context_.chunks[chunk];
    const int32_t unit = context_.layout.chunks[chunk].unit;
    const bool touches_nvme = context_.touches_nvme(chunk);
    if (touches_nvme) ahead_.push_back(chunk);
    state.position = position++;
    const bool taken = state.guess != Guess::none && decide(chunk, speculation_.right(unit));
    if (taken && state.guess == Guess::none) continue;  // its new weights are where they belong
    state.pending = true;
    ++context_.units[unit].pending_chunks;
    ++pending_;
    // One whose guess is running is taken by the worker that makes it.
    if (!taken) (touches_nvme ? ring_queue_ : resident_queue_).push_back(chunk);
    if (taken && state.guess == Guess::made) resident_queue_.push_back(chunk);
    // One whose states were read ahead has waited for this.
    if (state.residency == Residency::reading || state.residency == Residency::staged)
      stage_gradient(chunk, slots_[state.slot]);
    context_.journal.note(Happening::scheduled, unit, chunk);
  }
  judge(before);
  resume();
  pump();
}

void Updater::skip() {
  const ScheduleStats before = context_.stats;
  for (int32_t chunk : guesses_) decide(chunk, false);
  judge(before);
  pump();
}

/// What the guesses of this step came to.
void Updater::judge(const ScheduleStats& before) {
  const int64_t taken = context_.stats.guesses_taken - before.guesses_taken;
  const int64_t dropped = context_.stats.guesses_dropped - before.guesses_dropped;
  guessed_.swap(guesses_);
  std::erase_if(guessed_, [&](int32_t c) { return is_guessed_at_home(c); });  // nothing to read ahead
  guesses_.clear();
  unread_guesses_.clear();
  home_guesses_.clear();
  next_ahead_ = 0;
  speculation_.stepped(taken + dropped > 0, dropped == 0);
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
  const ChunkState& state = context_.chunks[chunk];
  Slot* slot = take_slot(state.pending || state.guess == Guess::wanted);
  if (slot == nullptr) return false;
  stage(chunk, *slot);
  return true;
}

/// The first chunk that fits, of the units whose updates somebody waits for; -1: there is none.
template <class Fits>
int32_t Updater::first_demanded(Fits fits) const {
  for (size_t i = context_.demanded_units.size(); i-- > 0;) {
    const Unit& unit = context_.layout.units[context_.demanded_units[i]];
    for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      if (fits(c)) return c;
    }
  }
  return -1;
}

/// What somebody waits for first, then the order of the update, then what the next step will need first.
int32_t Updater::next_to_stage() {
  const auto wanted = [&](int32_t c) {
    const ChunkState& state = context_.chunks[c];
    return state.pending && state.guess == Guess::none && state.residency == Residency::home &&
           context_.touches_nvme(c);
  };
  if (const int32_t chunk = first_demanded(wanted); chunk >= 0) return chunk;
  while (next_staged_ < ring_queue_.size() && !wanted(ring_queue_[next_staged_])) {
    // A chunk whose last version is still on its way out, or whose guess was dropped, is not home yet: it is
    // staged when it is, in its turn.
    const ChunkState& state = context_.chunks[ring_queue_[next_staged_]];
    if (state.pending && (state.residency == Residency::writing || state.guess != Guess::none)) return -1;
    ++next_staged_;
  }
  if (next_staged_ < ring_queue_.size()) return ring_queue_[next_staged_];
  if (const int32_t chunk = next_guess(); chunk >= 0) return chunk;
  return next_ahead();
}

/// The latest comes first: what backward leaves last, forward needs first. What is not reached before step()
/// is then what forward needs late.
int32_t Updater::next_guess() {
  const auto waits = [&](int32_t c) {
    const ChunkState& state = context_.chunks[c];
    return state.guess == Guess::wanted &&
           (state.residency == Residency::home || state.residency == Residency::writing);
  };
  while (!unread_guesses_.empty() && !waits(unread_guesses_.back())) unread_guesses_.pop_back();
  const auto next = std::find_if(unread_guesses_.rbegin(), unread_guesses_.rend(), [&](int32_t c) {
    return waits(c) && context_.chunks[c].residency == Residency::home;
  });
  return next == unread_guesses_.rend() ? -1 : *next;
}

/// By the last step: what it updated first, or, where updates are guessed, what it guessed first, so that
/// the disk is busy under forward too.
int32_t Updater::next_ahead() {
  if (!ahead_allowed_) return -1;
  const std::vector<int32_t>& order = speculation_.active() ? guessed_ : ahead_;
  const auto is_there = [&](int32_t c) {
    const ChunkState& state = context_.chunks[c];
    return state.guess != Guess::none || state.residency == Residency::reading ||
           state.residency == Residency::staged;
  };
  while (next_ahead_ < order.size() && is_there(order[next_ahead_])) ++next_ahead_;
  if (next_ahead_ >= order.size()) return -1;  // beyond: guessing began, and the list is another one
  const ChunkState& state = context_.chunks[order[next_ahead_]];
  if (state.pending || state.residency != Residency::home) return -1;
  const bool room =
      std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.chunk < 0; });
  return room ? order[next_ahead_++] : -1;
}

Updater::Slot* Updater::take_slot(bool may_drop_copies) {
  Slot* copy = nullptr;
  for (Slot& slot : slots_) {
    if (slot.chunk < 0) return &slot;
    const ChunkState& state = context_.chunks[slot.chunk];
    if (slot.in_flight == 0 && state.residency == Residency::staged && !state.pending &&
        state.guess == Guess::none)
      copy = &slot;
  }
  if (copy == nullptr || !may_drop_copies) return nullptr;
  free_slot(*copy);
  return copy;
}

void Updater::stage(int32_t chunk, Slot& slot) {
  if (!context_.touches_nvme(chunk)) throw std::logic_error("a chunk wholly on the host was to be read");
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
    if (state.extents[i].empty()) {  // never written: the worker clears it, without the mutex
      slot.states[i].start(transfer.memory, bytes);
      continue;
    }
    transfer.kind = io::Transfer::Kind::read;
    transfer.priority = state.pending ? io::Transfer::Priority::demand : io::Transfer::Priority::prefetch;
    transfer.extent = state.extents[i];
    if (component != Component::hi) slot.states[i].expect(transfer);
    ++slot.in_flight;
    context_.submit(transfer);
  }
  if (state.pending) stage_gradient(chunk, slot);
  transferred(slot);
}

/// Reads a spilled gradient into the slot, behind the components. step() has decided, so it is final and
/// written.
void Updater::stage_gradient(int32_t chunk, Slot& slot) {
  if (!context_.plan.gradients_on_nvme[chunk]) return;
  const ChunkState& state = context_.chunks[chunk];
  int64_t offset = 0;
  for (Component component : kAllComponents) {
    if (context_.in_store(chunk, component)) offset += context_.component_bytes(chunk, component);
  }
  slot.gradient.kind = io::Transfer::Kind::read;
  slot.gradient.priority = io::Transfer::Priority::demand;
  slot.gradient.extent = state.gradient_extent;
  slot.gradient.memory = slot.memory + offset;
  ++slot.in_flight;
  context_.submit(slot.gradient);
}

void Updater::on_transfer(io::Transfer& transfer) noexcept {
  Slot& slot = *static_cast<Slot*>(transfer.context);
  Updater& self = *slot.owner;
  const std::lock_guard guard(self.context_.mutex);
  self.context_.completed(transfer);
  if (transfer.error) {
    self.context_.fail(fmt::format(
        "states of {}: {}", self.context_.layout.units[self.context_.layout.chunks[slot.chunk].unit].name,
        transfer.error->message()));
  }
  self.transferred(slot);
  self.pump();
}

void Updater::lend(int32_t chunk) {
  ++slots_[context_.chunks[chunk].slot].in_flight;
}

void Updater::returned(int32_t chunk) {
  transferred(slots_[context_.chunks[chunk].slot]);
  pump();
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
  } else if (state.residency == Residency::writing) {
    for (Component component : kAllComponents) {
      const auto i = static_cast<size_t>(component);
      if (!context_.in_store(chunk, component)) continue;
      // The old version goes only now that the new one is complete; a failed write leaves the old one in
      // place. Both are held while step() has not decided between them.
      if (!context_.failure.empty()) continue;
      state.guessed_extents[i] = slot.transfers[i].extent;
    }
    context_.journal.note(Happening::written, unit, chunk, slot.index);
    free_slot(slot);
    if (state.verdict == Verdict::drop) {
      drop(state);
    } else if (!state.writes_a_guess()) {
      adopt(state);
    }
  }
  context_.changed.notify_all();
}

void Updater::free_slot(Slot& slot) {
  ChunkState& state = context_.chunks[slot.chunk];
  state.become(Residency::home);
  state.slot = -1;
  state.staged_weights = nullptr;
  slot.chunk = -1;
  slot.gradient.memory = nullptr;
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
  while (!home_guesses_.empty() && !is_ready(home_guesses_.back())) home_guesses_.pop_back();
  const int32_t chunk = next_ready();
  if (chunk < 0) return false;
  dispatch(chunk);
  return true;
}

bool Updater::is_ready(int32_t chunk) const {
  const ChunkState& state = context_.chunks[chunk];
  if (state.guess == Guess::made) return state.pending && state.verdict == Verdict::take;
  // A spilled gradient may come after the states, and weights may be copied from the slot.
  const auto in_slot = [&] {
    return state.residency == Residency::staged && slots_[state.slot].in_flight == 0;
  };
  if (state.guess == Guess::wanted)
    return is_guessed_at_home(chunk) ? state.residency == Residency::home : in_slot();
  if (!state.pending || state.guess != Guess::none) return false;
  return context_.touches_nvme(chunk) ? in_slot() : state.residency == Residency::home;
}

int32_t Updater::next_ready() const {
  if (const int32_t chunk = first_demanded([&](int32_t c) { return is_ready(c); }); chunk >= 0) return chunk;
  int32_t best = next_resident_ < resident_queue_.size() ? resident_queue_[next_resident_] : -1;
  for (const Slot& slot : slots_) {
    if (slot.chunk < 0 || !is_ready(slot.chunk)) continue;
    if (best < 0 || earlier(context_.chunks[slot.chunk], context_.chunks[best])) best = slot.chunk;
  }
  // The latest comes first, as in next_guess().
  return best < 0 && !home_guesses_.empty() ? home_guesses_.back() : best;
}

void Updater::dispatch(int32_t chunk) {
  ChunkState& state = context_.chunks[chunk];
  if (state.guess == Guess::made) {
    state.guess = Guess::taking;
  } else {
    state.become(Residency::updating);
    const bool guessing = state.guess == Guess::wanted;
    if (guessing) state.guess = Guess::running;
    context_.journal.note(guessing ? Happening::guessing : Happening::updating,
                          context_.layout.chunks[chunk].unit, chunk, state.slot);
  }
  ++running_;
  context_.resources.executor->submit([this, chunk] { run(chunk); });
}

/// What a worker needs for one update.
struct Updater::Work {
  const Unit& unit;
  const Chunk& chunk;
  ChunkMemory memory;
  std::byte* gradients = nullptr;
  optim::Element element = optim::Element::fp32;  // of the gradients
  std::span<const optim::Factors> factors{};
  std::span<const uint8_t> present{};
  std::span<io::Sealed> states{};  // by component; empty: they live on the host
  /// By component: copied to `memory` first; null: it is there.
  std::array<const std::byte*, kComponents> old{};
  std::array<std::span<std::byte>, kComponents> never_written{};  // in the slot; they are zero

  bool copies() const {
    return std::ranges::any_of(old, [](const std::byte* data) { return data != nullptr; });
  }
  /// Of elements begin <= i < end; of a chunk that ends there its scales, too.
  void copy(int64_t begin, int64_t end) const {
    for (size_t i = 0; i < old.size(); ++i) {
      if (old[i] == nullptr) continue;
      const Component component{static_cast<uint8_t>(i)};
      const int64_t from = begin * unit.component_element_bytes(component);
      const int64_t to = end == chunk.elements ? unit.component_bytes(component, end)
                                               : end * unit.component_element_bytes(component);
      std::memcpy(memory.component[i] + from, old[i] + from, static_cast<size_t>(to - from));
    }
  }
};

/// States that were read for it go block by block: each is compared with its checksum, updated, and
/// checksummed for its way back while it is in the cache. So does what is copied first, for a guess. With
/// scales, which lie behind a whole chunk's codes, the chunk is one block.
void Updater::update(Work work) {
  for (const std::span<std::byte> memory : work.never_written) std::ranges::fill(memory, std::byte{0});
  const auto for_each_state = [&](auto visit) {
    if (work.states.empty()) return;
    for (const Component state : kAllComponents) {
      if (state != Component::hi && work.unit.has(state))
        visit(work.states[static_cast<size_t>(state)], static_cast<size_t>(state),
              work.unit.component_element_bytes(state));
    }
  };
  const int64_t all = work.chunk.elements;
  const bool scaled = std::ranges::any_of(work.unit.components(), &optim::ComponentSpec::scaled);
  int64_t step = !work.states.empty() ? 0 : work.copies() ? kCopiedElements : all;
  for_each_state(
      [&](io::Sealed&, size_t, int64_t width) { step = std::max(step, io::kChecksumBlockBytes / width); });
  if (scaled) step = all;
  for (int64_t begin = 0; begin < all; begin += step) {
    const int64_t end = std::min(begin + step, all);
    work.copy(begin, end);
    const auto end_of = [&](const io::Sealed& state, int64_t width) {
      return scaled ? state.bytes() : end * width;
    };
    for_each_state([&](io::Sealed& state, size_t i, int64_t width) {
      work.memory.component[i] =
          state.open(context_.store(), begin * width, end_of(state, width)) - begin * width;
    });
    update_chunk(work.unit, work.chunk, work.factors, work.present, work.memory,
                 {work.gradients, work.element}, {begin, end});
    for_each_state(
        [&](io::Sealed& state, size_t, int64_t width) { state.seal(begin * width, end_of(state, width)); });
  }
}

/// Room in the store for a chunk's new version. The store may have to lengthen its files, so a worker asks it
/// without the lock, before the update is told of.
Updater::Extents Updater::allocate(int32_t chunk) {
  Extents fresh{};
  for (Component component : kAllComponents) {
    if (context_.in_store(chunk, component))
      fresh[static_cast<size_t>(component)] =
          context_.store().allocate(context_.component_bytes(chunk, component));
  }
  return fresh;
}

void Updater::release(const Extents& extents) {
  for (const io::Extent& extent : extents) {
    if (!extent.empty()) context_.store().release(extent);
  }
}

void Updater::run(int32_t chunk) noexcept {
  const Chunk& c = context_.layout.chunks[chunk];
  const Unit& unit = context_.layout.units[c.unit];
  const UnitState& unit_state = context_.units[c.unit];
  Work work{.unit = unit,
            .chunk = c,
            .memory = {.index = context_.layout.global_begin(c), .seed = context_.rounding_seed(c.unit)}};
  std::byte* home = nullptr;    // of hi
  std::byte* second = nullptr;  // guessed hi
  Guess guess = Guess::none;
  bool in_slot = false;
  Extents fresh{};  // for what is written back
  const int64_t weights_bytes = context_.component_bytes(chunk, Component::hi);
  {
    const std::lock_guard guard(context_.mutex);
    context_.meter.begin(Activity::update);
    const ChunkState& state = context_.chunks[chunk];
    work.memory.component = state.home;
    guess = state.guess;
    in_slot = guess != Guess::taking && state.slot >= 0;
    home = state.home[0];
    second = state.second_weights;
    if (guess == Guess::running && is_guessed_at_home(chunk)) {
      work.old = {state.home[0], state.home[1], state.home[2], state.home[3]};
      work.memory.component = state.second;
    } else if (guess != Guess::taking) {
      if (context_.in_store(chunk, Component::hi)) work.memory.component[0] = state.staged_weights;
      if (context_.plan.states_on_nvme[chunk]) work.states = slots_[state.slot].states;
      for (Component component : kAllComponents) {
        const auto i = static_cast<size_t>(component);
        if (context_.in_store(chunk, component) && state.extents[i].empty())
          work.never_written[i] = {slots_[state.slot].transfers[i].memory,
                                   static_cast<size_t>(context_.component_bytes(chunk, component))};
      }
    }
    work.element = state.gradient_element;
    work.gradients =
        context_.plan.gradients_on_nvme[chunk] ? slots_[state.slot].gradient.memory : state.gradient;
  }
  std::string failure;
  try {
    if (guess == Guess::taking) {
      std::memcpy(home, second, static_cast<size_t>(weights_bytes));
    } else if (guess == Guess::running) {
      if (second != nullptr) {
        work.old[0] = home;
        work.memory.component[0] = second;
      }
      work.factors = unit_state.guessed_factors;
      work.present = unit_state.guessed;
      update(work);
    } else {
      work.factors = unit_state.factors;
      work.present = unit_state.updated;
      update(work);
    }
    if (in_slot) fresh = allocate(chunk);
  } catch (const io::StoreError& error) {
    failure = fmt::format("states of {}: {}", unit.name, error.what());
  } catch (const std::exception& error) {
    failure = fmt::format("updating {}: {}", unit.name, error.what());
  }
  std::unique_lock lock(context_.mutex);
  --running_;
  context_.meter.end(Activity::update);
  if (guess != Guess::taking) context_.meter.updated(c.elements);
  if (!failure.empty()) return context_.fail(failure);
  // Nothing follows an update in an engine that has failed: its end takes the executor and the store away
  // while the last tasks run, and who waits for this chunk is told of the failure.
  if (!context_.failure.empty()) return;
  try {
    ChunkState& state = context_.chunks[chunk];
    if (guess == Guess::running) {
      guessed(lock, chunk, fresh);
    } else {
      // Until the weights are delivered nobody else may touch them: the chunk stays as it is.
      gatherer_.deliver(lock, chunk, work.memory.component[0]);
      if (guess == Guess::taking) take(state);
      updated(chunk);
      if (in_slot) {
        write_back(chunk, slots_[state.slot], fresh);
      } else if (guess == Guess::none) {
        state.become(Residency::home);
      }
    }
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
  if (!state.gradient_kept) context_.release_gradient(state);
  ++context_.stats.updates;
  context_.journal.note(Happening::updated, unit, chunk, state.slot);
  if (--context_.units[unit].pending_chunks == 0) context_.end_demand(unit);
  context_.changed.notify_all();
}

// ---- guesses

void Updater::guess(int32_t unit) {
  const Unit& u = context_.layout.units[unit];
  const auto& guessed = context_.units[unit].guessed;
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    ChunkState& state = context_.chunks[c];
    if (state.guess != Guess::none || !speculation_.may_guess(c)) continue;
    if (!context_.layout.chunks[c].has_any(guessed)) continue;
    if (is_guessed_at_home(c)) {
      state.second_weights = state.second[0];
    } else if (state.home[0] != nullptr) {
      state.second_weights = speculation_.take_weights();
      if (state.second_weights == nullptr) break;
    }
    state.guess = Guess::wanted;
    guesses_.push_back(c);
    (is_guessed_at_home(c) ? home_guesses_ : unread_guesses_).push_back(c);
  }
  pump();
}

/// step()'s word on a chunk's guess: true if its new version counts.
bool Updater::decide(int32_t chunk, bool right) {
  ChunkState& state = context_.chunks[chunk];
  if (state.guess == Guess::none || state.verdict != Verdict::open) return false;
  if (state.guess == Guess::wanted) {  // nothing was done yet
    end_guess(state);
    return false;
  }
  ++(right ? context_.stats.guesses_taken : context_.stats.guesses_dropped);
  state.verdict = right ? Verdict::take : Verdict::drop;
  if (state.guess == Guess::made) {
    if (right && state.second_weights == nullptr) {
      take(state);
      ++context_.stats.updates;
    } else if (!right && state.residency == Residency::home) {
      drop(state);
    }
  }
  return right;
}

/// A worker has made the guess: it is written behind like any new version.
void Updater::guessed(std::unique_lock<std::mutex>& lock, int32_t chunk, const Extents& fresh) {
  if (is_guessed_at_home(chunk)) return guessed_at_home(chunk);
  ChunkState& state = context_.chunks[chunk];
  Slot& slot = slots_[state.slot];
  // step() has taken it while it was made, and its weights are in the slot.
  const bool delivers = state.verdict == Verdict::take && state.second_weights == nullptr;
  if (delivers) gatherer_.deliver(lock, chunk, state.staged_weights);
  context_.journal.note(Happening::guessed, context_.layout.chunks[chunk].unit, chunk, state.slot);
  if (state.verdict == Verdict::drop) {
    release(fresh);
    free_slot(slot);
    drop(state);
  } else {
    state.guess = Guess::made;
    write_back(chunk, slot, fresh);
    if (state.verdict == Verdict::take && state.second_weights != nullptr) {
      dispatch(chunk);
    } else if (delivers) {
      take(state);
      updated(chunk);
    }
  }
  context_.changed.notify_all();
}

/// There is nothing to write: the new version waits beside the old one.
void Updater::guessed_at_home(int32_t chunk) {
  ChunkState& state = context_.chunks[chunk];
  context_.journal.note(Happening::guessed, context_.layout.chunks[chunk].unit, chunk);
  state.become(Residency::home);
  state.guess = Guess::made;
  if (state.verdict == Verdict::take) dispatch(chunk);
  if (state.verdict == Verdict::drop) {
    drop(state);
    // Its turn may have passed while it was being guessed.
    if (state.pending)
      resident_queue_.insert(resident_queue_.begin() + static_cast<std::ptrdiff_t>(next_resident_), chunk);
  }
  context_.changed.notify_all();
}

/// The guessed weights are where they belong: from here the new version is the chunk's.
void Updater::take(ChunkState& state) {
  adopt(state);  // what is still on its way out follows when it is written
  for (size_t i = 1; i < state.second.size(); ++i) {
    if (state.second[i] != nullptr) std::swap(state.home[i], state.second[i]);
  }
  end_guess(state);
}

/// The old version stays the chunk's.
void Updater::drop(ChunkState& state) {
  release(state.guessed_extents);
  state.guessed_extents = {};
  end_guess(state);
}

/// New extents take the place of the old ones.
void Updater::adopt(ChunkState& state) {
  for (size_t i = 0; i < state.extents.size(); ++i) {
    if (state.guessed_extents[i].empty()) continue;
    if (!state.extents[i].empty()) context_.store().release(state.extents[i]);
    state.extents[i] = state.guessed_extents[i];
    state.guessed_extents[i] = {};
  }
}

void Updater::end_guess(ChunkState& state) {
  if (state.second_weights != state.second[0]) speculation_.give_back(state.second_weights);
  state.second_weights = nullptr;
  state.guess = Guess::none;
  state.verdict = Verdict::open;
}

int64_t Updater::guesses_unfinished() const {
  return std::count_if(guesses_.begin(), guesses_.end(), [&](int32_t c) {
    const ChunkState& state = context_.chunks[c];
    return state.guess == Guess::wanted || state.guess == Guess::running ||
           (state.guess == Guess::made && state.residency == Residency::writing);
  });
}

void Updater::take_back(std::unique_lock<std::mutex>& lock, int32_t unit) {
  const Unit& u = context_.layout.units[unit];
  const auto begin = context_.chunks.begin() + u.first_chunk;
  const auto end = begin + u.chunk_count;
  if (std::all_of(begin, end, [](const ChunkState& state) { return state.guess == Guess::none; })) return;
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) decide(c, false);
  context_.wait(
      lock,
      [&] { return std::none_of(begin, end, [](const ChunkState& s) { return s.guess == Guess::running; }); },
      Cause::updates, unit);
}

void Updater::take_back_all(std::unique_lock<std::mutex>& lock) {
  for (size_t u = 0; u < context_.units.size(); ++u) take_back(lock, static_cast<int32_t>(u));
}

void Updater::write_back(int32_t chunk, Slot& slot, const Extents& fresh) {
  context_.chunks[chunk].become(Residency::writing);
  context_.journal.note(Happening::writing, context_.layout.chunks[chunk].unit, chunk, slot.index);
  slot.in_flight = 1;
  for (Component component : kAllComponents) {
    if (!context_.in_store(chunk, component)) continue;
    io::Transfer& transfer = slot.transfers[static_cast<size_t>(component)];
    transfer.kind = io::Transfer::Kind::write;
    transfer.priority = io::Transfer::Priority::write_behind;
    transfer.extent = fresh[static_cast<size_t>(component)];
    if (component != Component::hi) slot.states[static_cast<size_t>(component)].hand_over(transfer);
    ++slot.in_flight;
    context_.submit(transfer);
  }
  transferred(slot);
}

// ---- waiting

bool Updater::at_rest() const {
  return pending_ == 0 && running_ == 0 && std::all_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
           return slot.chunk < 0 ||
                  (slot.in_flight == 0 && context_.chunks[slot.chunk].residency == Residency::staged);
         });
}

void Updater::wait_for(std::unique_lock<std::mutex>& lock, int32_t unit) {
  if (context_.units[unit].pending_chunks == 0) return;
  context_.demand(unit);
  pump();
  context_.wait(
      lock, [&] { return context_.units[unit].pending_chunks == 0; }, Cause::updates, unit);
}

void Updater::finish(std::unique_lock<std::mutex>& lock) {
  pump();
  context_.wait(
      lock, [&] { return pending_ == 0; }, Cause::last_updates);
}

void Updater::quiesce(std::unique_lock<std::mutex>& lock) {
  ahead_allowed_ = false;
  take_back_all(lock);
  pump();
  context_.wait(
      lock, [&] { return at_rest(); }, Cause::rest);
  for (Slot& slot : slots_) {
    if (slot.chunk >= 0) free_slot(slot);
  }
  next_ahead_ = 0;
}

}  // namespace overspill::engine
