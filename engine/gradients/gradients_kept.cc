// What becomes of gradients once they are in (gradients.h): kept beyond their step, cleared, scaled, made
// zeros.
#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/gradients/gradients.h"

namespace overspill::engine {

void Gradients::put_away() {
  const MutexLock turn(turn_);
  const MutexLock lock(core_.mutex());
  staging_.flush();
}

void Gradients::clear() {
  const MutexLock turn(turn_);
  const MutexLock lock(core_.mutex());
  handed_over();
  forget();
}

void Gradients::throw_away() {
  if (any()) return clear();
  const MutexLock turn(turn_);
  const MutexLock lock(core_.mutex());
  forget();
}

void Gradients::forget() {
  ++forgotten_;
  std::erase_if(half_added_, [&](const auto& half) REQUIRES(engine_mutex) {
    return only_.has(setup_.layout.units[half.first].segments[half.second].group);
  });
  for (auto& unit : presence_) std::fill(unit.begin(), unit.end(), Presence::absent);
  for (size_t c = 0; c < model_.chunks.size(); ++c) {
    if (is_aside(setup_.layout.chunks[c].unit)) continue;
    ChunkState& state = model_.chunks[c];
    state.gradient_kept = false;
    if (setup_.config.poison && setup_.layout.slices == 1 && state.gradient != nullptr && !state.pending &&
        state.guess == Guess::none)
      std::memset(state.gradient, 0xFF, static_cast<size_t>(setup_.gradient_bytes(static_cast<int32_t>(c))));
  }
  staging_.discard([&](int32_t chunk)
                       REQUIRES(engine_mutex) { return !is_aside(setup_.layout.chunks[chunk].unit); });
}

void Gradients::drop(int32_t unit, int32_t segment) {
  presence_[unit][segment] = Presence::absent;
}

void Gradients::scale(double factor) {
  const MutexLock guard(core_.mutex());
  for (size_t u = 0; u < presence_.size(); ++u) {
    for (size_t s = 0; s < presence_[u].size(); ++s) {
      if (presence_[u][s] == Presence::there) factors_[u][s] *= factor;
    }
  }
}

void Gradients::become_zero() {
  std::vector<std::vector<Presence>> becoming;
  {
    const MutexLock lock(core_.mutex());
    becoming = presence_;
  }
  throw_away();
  for (auto& unit : becoming) {
    std::replace_if(
        unit.begin(), unit.end(), [](Presence presence) { return presence != Presence::absent; },
        Presence::zero);
  }
  const MutexLock guard(core_.mutex());
  presence_ = std::move(becoming);
}

void Gradients::reuse() {
  const MutexLock guard(core_.mutex());
  for (auto& unit : presence_) std::replace(unit.begin(), unit.end(), Presence::used, Presence::there);
}

void Gradients::handed_over() {
  const bool some = any_present();  // a step without gradients leaves those of the one before
  for (size_t u = 0; u < presence_.size(); ++u) {
    if (some) {
      std::replace(presence_[u].begin(), presence_[u].end(), Presence::used, Presence::absent);
      std::replace(presence_[u].begin(), presence_[u].end(), Presence::there, Presence::used);
    }
    if (!is_aside(static_cast<int32_t>(u))) std::fill(arrivals_[u].begin(), arrivals_[u].end(), 0);
  }
  for (ChunkState& state : model_.chunks) state.gradient_kept = true;
  if (setup_.layout.slices > 1) sums_.restart();
}

void Gradients::reduce_presence() {
  if (setup_.layout.slices == 1) return;
  std::vector<double> counts;
  {
    const MutexLock lock(core_.mutex());
    for (const auto& unit : presence_) {
      for (Presence presence : unit) counts.push_back(presence == Presence::there ? 1 : 0);
    }
  }
  ranks_.communicator->all_reduce_sum(counts);
  size_t next = 0;
  const MutexLock lock(core_.mutex());
  for (auto& unit : presence_) {
    for (Presence& presence : unit) {
      if (counts[next++] > 0) presence = Presence::there;
    }
  }
}

}  // namespace overspill::engine
