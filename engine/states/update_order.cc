#include "engine/states/update_order.h"

#include <algorithm>

namespace overspill::engine {
namespace {

/// The order of the update; guesses come last.
bool earlier(const ChunkState& a, const ChunkState& b) REQUIRES(engine_mutex) {
  return a.pending != b.pending ? a.pending : a.position < b.position;
}

}  // namespace

UpdateOrder::UpdateOrder(const Setup& setup, const ModelStates& model, const Demand& demand,
                         const Speculation& speculation, const StateRing& ring)
    : setup_(setup), model_(model), demand_(demand), speculation_(speculation), ring_(ring) {
  for (auto* chunks :
       {&through_ring_, &on_host_, &ahead_, &guesses_, &guessed_, &unread_guesses_, &home_guesses_})
    chunks->reserve(model.chunks.size());
  read_ahead();
}

void UpdateOrder::begin_step() {
  through_ring_.clear();
  on_host_.clear();
  ahead_.clear();
  next_through_ring_ = next_on_host_ = 0;
}

void UpdateOrder::add(int32_t chunk) {
  (setup_.touches_nvme(chunk) ? through_ring_ : on_host_).push_back(chunk);
}

void UpdateOrder::expect_again(int32_t chunk) {
  if (setup_.touches_nvme(chunk)) ahead_.push_back(chunk);
}

void UpdateOrder::add_next(int32_t chunk) {
  on_host_.insert(on_host_.begin() + static_cast<std::ptrdiff_t>(next_on_host_), chunk);
}

void UpdateOrder::add_guess(int32_t chunk) {
  guesses_.push_back(chunk);
  (setup_.plan.held_twice[chunk] ? home_guesses_ : unread_guesses_).push_back(chunk);
}

void UpdateOrder::end_guesses() {
  guessed_.swap(guesses_);
  std::erase_if(guessed_, [&](int32_t c) { return setup_.plan.held_twice[c]; });  // nothing to read ahead
  guesses_.clear();
  unread_guesses_.clear();
  home_guesses_.clear();
  next_ahead_ = 0;
}

/// The first chunk that fits, of the units whose updates somebody waits for.
template <class Fits>
int32_t UpdateOrder::first_demanded(Fits fits) const {
  for (size_t i = demand_.updates.size(); i-- > 0;) {
    const Unit& unit = setup_.layout.units[demand_.updates[i]];
    for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      if (fits(c)) return c;
    }
  }
  return -1;
}

// ---- reading

bool UpdateOrder::has_to_be_read(int32_t chunk) const {
  const ChunkState& state = model_.chunks[chunk];
  return state.pending && state.guess == Guess::none && state.residency == Residency::home &&
         setup_.touches_nvme(chunk);
}

int32_t UpdateOrder::next_to_read() {
  const auto wanted = [&](int32_t c) REQUIRES(engine_mutex) { return has_to_be_read(c); };
  if (const int32_t chunk = first_demanded(wanted); chunk >= 0) return chunk;
  while (next_through_ring_ < through_ring_.size() && !wanted(through_ring_[next_through_ring_])) {
    // A chunk whose last version is still on its way out, or whose guess was dropped, is not home yet: it is
    // read when it is, in its turn.
    const ChunkState& state = model_.chunks[through_ring_[next_through_ring_]];
    if (state.pending && (state.residency == Residency::writing || state.guess != Guess::none)) return -1;
    ++next_through_ring_;
  }
  if (next_through_ring_ < through_ring_.size()) return through_ring_[next_through_ring_];
  if (const int32_t chunk = next_guess_to_read(); chunk >= 0) return chunk;
  return next_ahead();
}

/// The latest comes first: what backward leaves last, forward needs first. What is not reached before step()
/// is then what forward needs late.
int32_t UpdateOrder::next_guess_to_read() {
  const auto waits = [&](int32_t c) REQUIRES(engine_mutex) {
    const ChunkState& state = model_.chunks[c];
    return state.guess == Guess::wanted &&
           (state.residency == Residency::home || state.residency == Residency::writing);
  };
  while (!unread_guesses_.empty() && !waits(unread_guesses_.back())) unread_guesses_.pop_back();
  const auto next =
      std::find_if(unread_guesses_.rbegin(), unread_guesses_.rend(), [&](int32_t c) REQUIRES(engine_mutex) {
        return waits(c) && model_.chunks[c].residency == Residency::home;
      });
  return next == unread_guesses_.rend() ? -1 : *next;
}

/// By the last step: what it updated first, or, where updates are guessed, what it guessed first, so that
/// the disk is busy under forward too.
int32_t UpdateOrder::next_ahead() {
  if (!reads_ahead_) return -1;
  const std::vector<int32_t>& order = speculation_.active() ? guessed_ : ahead_;
  const auto is_there = [&](int32_t c) REQUIRES(engine_mutex) {
    const ChunkState& state = model_.chunks[c];
    return state.guess != Guess::none || state.residency == Residency::reading ||
           state.residency == Residency::staged;
  };
  while (next_ahead_ < order.size() && is_there(order[next_ahead_])) ++next_ahead_;
  if (next_ahead_ >= order.size()) return -1;  // beyond: guessing began, and the list is another one
  const ChunkState& state = model_.chunks[order[next_ahead_]];
  if (state.pending || state.residency != Residency::home) return -1;
  return ring_.has_free() ? order[next_ahead_++] : -1;
}

// ---- updating

bool UpdateOrder::can_be_updated(int32_t chunk) const {
  const ChunkState& state = model_.chunks[chunk];
  if (state.guess == Guess::made) return state.pending && state.verdict == Verdict::take;
  if (state.guess == Guess::wanted)
    return setup_.plan.held_twice[chunk] ? state.residency == Residency::home : ring_.ready(chunk);
  if (!state.pending || state.guess != Guess::none) return false;
  return setup_.touches_nvme(chunk) ? ring_.ready(chunk) : state.residency == Residency::home;
}

int32_t UpdateOrder::next_to_update() {
  const auto ready = [&](int32_t c) REQUIRES(engine_mutex) { return can_be_updated(c); };
  while (next_on_host_ < on_host_.size() && !ready(on_host_[next_on_host_])) ++next_on_host_;
  while (!home_guesses_.empty() && !ready(home_guesses_.back())) home_guesses_.pop_back();
  if (const int32_t chunk = first_demanded(ready); chunk >= 0) return chunk;
  int32_t best = next_on_host_ < on_host_.size() ? on_host_[next_on_host_] : -1;
  for (int32_t slot = 0; slot < ring_.slots(); ++slot) {
    const int32_t chunk = ring_.chunk_in(slot);
    if (chunk < 0 || !ready(chunk)) continue;
    if (best < 0 || earlier(model_.chunks[chunk], model_.chunks[best])) best = chunk;
  }
  // The latest comes first, as in next_guess_to_read().
  return best < 0 && !home_guesses_.empty() ? home_guesses_.back() : best;
}

}  // namespace overspill::engine
