#include "engine/states/updater.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "engine/states/update_task.h"

namespace overspill::engine {

Updater::Updater(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model, Demand& demand,
                 Gatherer& gatherer, Snapshot& snapshot)
    : setup_(setup),
      core_(core),
      hardware_(hardware),
      model_(model),
      demand_(demand),
      gatherer_(gatherer),
      snapshot_(snapshot),
      speculation_(setup, hardware, model),
      ring_(setup, core, hardware, model, *this),
      order_(setup, model, demand, speculation_, ring_) {
  gatherer.copies_from_slots_of(ring_);
}

void Updater::schedule(std::span<const int32_t> chunks) {
  order_.begin_step();
  const ScheduleStats before = core_.stats;
  int64_t position = 0;
  for (int32_t chunk : chunks) {
    ChunkState& state = model_.chunks[chunk];
    const int32_t unit = setup_.layout.chunks[chunk].unit;
    order_.expect_again(chunk);
    state.position = position++;
    const bool taken = state.guess != Guess::none && decide(chunk, speculation_.right(unit));
    if (taken && state.guess == Guess::none) continue;  // its new weights are where they belong
    state.pending = true;
    ++model_.units[unit].pending_chunks;
    ++pending_;
    // One whose guess is running is taken by the worker that makes it.
    if (!taken) order_.add(chunk);
    if (taken && state.guess == Guess::made) order_.add_taken(chunk);
    // One whose states were read ahead has waited for this.
    if (state.residency == Residency::reading || state.residency == Residency::staged)
      ring_.read_gradient(chunk);
    core_.journal.note(Happening::scheduled, unit, chunk);
  }
  judge(before);
  resume();
  pump();
}

void Updater::skip() {
  const ScheduleStats before = core_.stats;
  for (int32_t chunk : order_.guesses()) decide(chunk, false);
  judge(before);
  pump();
}

/// What the guesses of this step came to.
void Updater::judge(const ScheduleStats& before) {
  const int64_t taken = core_.stats.guesses_taken - before.guesses_taken;
  const int64_t dropped = core_.stats.guesses_dropped - before.guesses_dropped;
  order_.end_guesses();
  speculation_.stepped(taken + dropped > 0, dropped == 0);
}

void Updater::pump() {
  if (!core_.failure.empty()) return;
  while (read_next() || dispatch_next()) {
  }
}

bool Updater::read_next() {
  const int32_t chunk = order_.next_to_read();
  if (chunk < 0) return false;
  const ChunkState& state = model_.chunks[chunk];
  const bool has_to_be = state.pending || state.guess == Guess::wanted;
  if (!ring_.has_free() && !(has_to_be && ring_.drop_a_copy())) return false;
  ring_.read(chunk);
  return true;
}

bool Updater::dispatch_next() {
  // A few more than workers, so that none waits for the lock; few enough that what is demanded is not queued
  // behind them.
  if (running_ > hardware_.executor->threads()) return false;
  const int32_t chunk = order_.next_to_update();
  if (chunk < 0) return false;
  dispatch(chunk);
  return true;
}

void Updater::dispatch(int32_t chunk) {
  ChunkState& state = model_.chunks[chunk];
  if (state.guess == Guess::made) {
    state.guess = Guess::taking;
  } else {
    state.become(Residency::updating);
    const bool guessing = state.guess == Guess::wanted;
    if (guessing) state.guess = Guess::running;
    core_.journal.note(guessing ? Happening::guessing : Happening::updating, setup_.layout.chunks[chunk].unit,
                       chunk, state.slot);
  }
  ++running_;
  hardware_.executor->submit([this, chunk] { run(chunk); });
}

/// Room in the store for a chunk's new version. The store may have to lengthen its files, so a worker asks it
/// without the lock, before the update is told of.
Extents Updater::allocate(int32_t chunk) {
  Extents fresh{};
  for (Component component : kAllComponents) {
    if (setup_.in_store(chunk, component))
      fresh[static_cast<size_t>(component)] = core_.store->allocate(setup_.component_bytes(chunk, component));
  }
  return fresh;
}

void Updater::release(const Extents& extents) {
  for (const io::Extent& extent : extents) {
    if (!extent.empty()) core_.store->release(extent);
  }
}

/// What a worker does with one chunk. As the chunk's guess was when it began: step() may decide meanwhile.
struct Updater::Job {
  int32_t chunk = -1;
  Guess guess = Guess::none;
  bool in_slot = false;
  std::byte* home = nullptr;    // of hi
  std::byte* second = nullptr;  // guessed hi
  UpdateTask task;
  Extents fresh{};  // for what is written back
};

/// On a worker.
void Updater::run(int32_t chunk) noexcept {
  const MutexLock lock(core_.mutex());
  try {
    snapshot_.before_change(chunk);
    core_.meter.begin(Activity::update);
    Job job = prepare(chunk);
    const std::string failure = perform(job);
    --running_;
    core_.meter.end(Activity::update);
    if (job.guess != Guess::taking) core_.meter.updated(job.task.chunk.elements);
    if (!failure.empty()) return core_.fail(failure);
    // Nothing follows an update in an engine that has failed: its end takes the executor and the store away
    // while the last tasks run, and who waits for this chunk is told of the failure.
    if (!core_.failure.empty()) return;
    conclude(job);
    pump();
  } catch (const std::exception& error) {
    const Unit& unit = setup_.layout.units[setup_.layout.chunks[chunk].unit];
    core_.fail(fmt::format("updating {}: {}", unit.name, error.what()));
  }
}

Updater::Job Updater::prepare(int32_t chunk) {
  const Chunk& c = setup_.layout.chunks[chunk];
  const UnitState& unit = model_.units[c.unit];
  const ChunkState& state = model_.chunks[chunk];
  const bool guesses = state.guess == Guess::running;
  Job job{.chunk = chunk,
          .guess = state.guess,
          .in_slot = state.guess != Guess::taking && state.slot >= 0,
          .home = state.home[0],
          .second = state.second_weights,
          .task = {.unit = setup_.layout.units[c.unit],
                   .chunk = c,
                   .memory = {.component = state.home,
                              .index = setup_.layout.global_begin(c),
                              .seed = setup_.rounding_seed(c.unit)},
                   .gradients = state.gradient,
                   .element = state.gradient_element,
                   .factors = guesses ? unit.guessed_factors : unit.factors,
                   .present = guesses ? unit.guessed : unit.updated}};
  UpdateTask& task = job.task;
  if (guesses && is_guessed_at_home(chunk)) {
    std::ranges::copy(state.home, task.old.begin());
    task.memory.component = state.second;
  } else if (job.in_slot) {
    prepare_in_slot(job);
  }
  return job;
}

/// What lies on NVMe is in the slot; a guess makes its weights beside those that count.
void Updater::prepare_in_slot(Job& job) {
  const int32_t chunk = job.chunk;
  const ChunkState& state = model_.chunks[chunk];
  UpdateTask& task = job.task;
  if (setup_.plan.gradients_on_nvme[chunk]) task.gradients = ring_.gradient(chunk);
  if (setup_.plan.states_on_nvme[chunk]) task.states = ring_.states(chunk);
  if (setup_.in_store(chunk, Component::hi)) task.memory.component[0] = state.staged_weights;
  for (Component component : kAllComponents) {
    const auto i = static_cast<size_t>(component);
    if (setup_.in_store(chunk, component) && state.extents[i].empty())
      task.never_written[i] = ring_.memory(chunk, component);
  }
  if (job.guess == Guess::running && job.second != nullptr) {
    task.old[0] = job.home;
    task.memory.component[0] = job.second;
  }
}

/// What went wrong; empty: nothing did.
std::string Updater::perform(Job& job) {
  const Unlocked unlocked(core_.mutex());
  UpdateTask& task = job.task;
  try {
    if (job.guess == Guess::taking) {
      std::memcpy(job.home, job.second,
                  static_cast<size_t>(setup_.component_bytes(job.chunk, Component::hi)));
    } else {
      task.run(core_.store.get());
    }
    if (job.in_slot) job.fresh = allocate(job.chunk);
    return "";
  } catch (const io::StoreError& error) {
    return fmt::format("states of {}: {}", task.unit.name, error.what());
  } catch (const std::exception& error) {
    return fmt::format("updating {}: {}", task.unit.name, error.what());
  }
}

void Updater::conclude(const Job& job) {
  if (job.guess == Guess::running) return guessed(job.chunk, job.fresh);
  ChunkState& state = model_.chunks[job.chunk];
  // Until the weights are delivered nobody else may touch them: the chunk stays as it is.
  gatherer_.deliver(job.chunk, job.task.memory.component[0]);
  if (job.guess == Guess::taking) take(state);
  updated(job.chunk);
  if (job.in_slot) {
    ring_.write(job.chunk, job.fresh);
  } else if (job.guess == Guess::none) {
    state.become(Residency::home);
  }
}

/// Both versions are held while step() has not decided between them.
void Updater::written(int32_t chunk) {
  ChunkState& state = model_.chunks[chunk];
  if (state.verdict == Verdict::drop) {
    drop(state);
  } else if (!state.writes_a_guess()) {
    adopt(state);
  }
}

void Updater::updated(int32_t chunk) {
  ChunkState& state = model_.chunks[chunk];
  const int32_t unit = setup_.layout.chunks[chunk].unit;
  state.pending = false;
  snapshot_.updated(chunk);
  --pending_;
  if (!state.gradient_kept) core_.store.give_up(state.gradient_extent);
  ++core_.stats.updates;
  core_.journal.note(Happening::updated, unit, chunk, state.slot);
  if (--model_.units[unit].pending_chunks == 0) demand_.end_updates(unit);
  core_.changed.notify_all();
}

// ---- guesses

void Updater::guess(int32_t unit) {
  const Unit& u = setup_.layout.units[unit];
  const auto& guessed = model_.units[unit].guessed;
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) {
    ChunkState& state = model_.chunks[c];
    if (state.guess != Guess::none || !speculation_.may_guess(c)) continue;
    if (!setup_.layout.chunks[c].has_any(guessed)) continue;
    if (is_guessed_at_home(c)) {
      state.second_weights = state.second[0];
    } else if (state.home[0] != nullptr) {
      state.second_weights = speculation_.take_weights();
      if (state.second_weights == nullptr) break;
    }
    state.guess = Guess::wanted;
    order_.add_guess(c);
  }
  pump();
}

/// step()'s word on a chunk's guess: true if its new version counts.
bool Updater::decide(int32_t chunk, bool right) {
  ChunkState& state = model_.chunks[chunk];
  if (state.guess == Guess::none || state.verdict != Verdict::open) return false;
  if (state.guess == Guess::wanted) {  // nothing was done yet
    end_guess(state);
    return false;
  }
  ++(right ? core_.stats.guesses_taken : core_.stats.guesses_dropped);
  state.verdict = right ? Verdict::take : Verdict::drop;
  if (state.guess == Guess::made) {
    if (right && state.second_weights == nullptr) {
      take(state);
      ++core_.stats.updates;
    } else if (!right && state.residency == Residency::home) {
      drop(state);
    }
  }
  return right;
}

/// A worker has made the guess: it is written behind like any new version.
void Updater::guessed(int32_t chunk, const Extents& fresh) {
  if (is_guessed_at_home(chunk)) return guessed_at_home(chunk);
  ChunkState& state = model_.chunks[chunk];
  // step() has taken it while it was made, and its weights are in the slot.
  const bool delivers = state.verdict == Verdict::take && state.second_weights == nullptr;
  if (delivers) gatherer_.deliver(chunk, state.staged_weights);
  core_.journal.note(Happening::guessed, setup_.layout.chunks[chunk].unit, chunk, state.slot);
  if (state.verdict == Verdict::drop) {
    release(fresh);
    ring_.release(chunk);
    drop(state);
  } else {
    state.guess = Guess::made;
    ring_.write(chunk, fresh);
    if (state.verdict == Verdict::take && state.second_weights != nullptr) {
      dispatch(chunk);
    } else if (delivers) {
      take(state);
      updated(chunk);
    }
  }
  core_.changed.notify_all();
}

/// There is nothing to write: the new version waits beside the old one.
void Updater::guessed_at_home(int32_t chunk) {
  ChunkState& state = model_.chunks[chunk];
  core_.journal.note(Happening::guessed, setup_.layout.chunks[chunk].unit, chunk);
  state.become(Residency::home);
  state.guess = Guess::made;
  if (state.verdict == Verdict::take) dispatch(chunk);
  if (state.verdict == Verdict::drop) {
    drop(state);
    // Its turn may have passed while it was being guessed.
    if (state.pending) order_.add_next(chunk);
  }
  core_.changed.notify_all();
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
    if (!state.extents[i].empty()) core_.store->release(state.extents[i]);
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
  return std::ranges::count_if(order_.guesses(), [&](int32_t c) REQUIRES(engine_mutex) {
    const ChunkState& state = model_.chunks[c];
    return state.guess == Guess::wanted || state.guess == Guess::running ||
           (state.guess == Guess::made && state.residency == Residency::writing);
  });
}

void Updater::take_back(int32_t unit) {
  const Unit& u = setup_.layout.units[unit];
  const auto begin = model_.chunks.begin() + u.first_chunk;
  const auto end = begin + u.chunk_count;
  if (std::all_of(begin, end,
                  [](const ChunkState& state) REQUIRES(engine_mutex) { return state.guess == Guess::none; }))
    return;
  for (int32_t c = u.first_chunk; c < u.first_chunk + u.chunk_count; ++c) decide(c, false);
  core_.wait(
      [&]() REQUIRES(engine_mutex) {
        return std::none_of(
            begin, end, [](const ChunkState& s) REQUIRES(engine_mutex) { return s.guess == Guess::running; });
      },
      Cause::updates, unit);
}

void Updater::take_back_all() {
  for (size_t u = 0; u < model_.units.size(); ++u) take_back(static_cast<int32_t>(u));
}

// ---- waiting

void Updater::wait_for(int32_t unit) {
  if (model_.units[unit].pending_chunks == 0) return;
  demand_.want_updates(unit);
  pump();
  core_.wait([&]() REQUIRES(engine_mutex) { return model_.units[unit].pending_chunks == 0; }, Cause::updates,
             unit);
}

void Updater::finish() {
  pump();
  core_.wait([&]() REQUIRES(engine_mutex) { return pending_ == 0; }, Cause::last_updates);
}

void Updater::quiesce() {
  order_.stop_reading_ahead();
  take_back_all();
  pump();
  core_.wait([&]() REQUIRES(engine_mutex) { return pending_ == 0 && running_ == 0 && ring_.at_rest(); },
             Cause::rest);
  ring_.release_all();
  order_.start_ahead_anew();
  snapshot_.wait();
}

}  // namespace overspill::engine
