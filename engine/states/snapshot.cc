#include "engine/states/snapshot.h"

#include <utility>

#include "engine/base/engine_failed.h"

namespace overspill::engine {

void Snapshot::mark(Taker& taker) {
  taker_ = &taker;
  error_ = nullptr;
  left_ = std::ssize(model_.chunks);
  for (ChunkState& state : model_.chunks) state.saving = state.pending ? Saving::awaited : Saving::due;
}

/// Whether what counts of the chunk is at home and in its extents, and in no slot on its way there.
bool Snapshot::is_settled(const ChunkState& state) const {
  return state.residency != Residency::updating && state.residency != Residency::writing;
}

void Snapshot::take_all() {
  const MutexLock lock(core_.mutex());
  for (size_t chunk = 0; chunk < model_.chunks.size() && left_ > 0; ++chunk) {
    const ChunkState& state = model_.chunks[chunk];
    const auto can_go_on = [&]() REQUIRES(engine_mutex) {
      return !core_.failure.empty() || state.saving == Saving::none || state.saving == Saving::taking ||
             (state.saving == Saving::due && is_settled(state));
    };
    while (!can_go_on()) core_.changed.wait(core_.mutex());
    if (!core_.failure.empty()) break;
    if (state.saving == Saving::due) take(static_cast<int32_t>(chunk));
  }
  while (taking_ > 0) core_.changed.wait(core_.mutex());
  if (!core_.failure.empty() && left_ > 0) fail(nullptr);
  taker_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  if (!core_.failure.empty()) throw EngineFailed(core_.failure);
}

void Snapshot::before_change(int32_t chunk) {
  const ChunkState& state = model_.chunks[chunk];
  if (state.saving == Saving::due) take(chunk);
  while (state.saving == Saving::taking) core_.changed.wait(core_.mutex());
}

void Snapshot::updated(int32_t chunk) {
  ChunkState& state = model_.chunks[chunk];
  if (state.saving == Saving::awaited) state.saving = Saving::due;
}

void Snapshot::wait() {
  while (left_ > 0 && core_.failure.empty()) core_.changed.wait(core_.mutex());
}

void Snapshot::take(int32_t chunk) {
  ChunkState& state = model_.chunks[chunk];
  state.saving = Saving::taking;
  ++taking_;
  std::exception_ptr error;
  try {
    Taker& taker = *taker_;
    taker.pin(chunk);
    const Unlocked unlocked(core_.mutex());
    taker.write(chunk);
  } catch (...) {
    error = std::current_exception();
  }
  --taking_;
  if (state.saving == Saving::taking) {
    state.saving = Saving::none;
    if (left_ > 0) --left_;
  }
  if (error) fail(std::move(error));
  core_.changed.notify_all();
}

// Training goes on: nobody waits for the rest.
void Snapshot::fail(std::exception_ptr error) {
  if (!error_) error_ = std::move(error);
  left_ = 0;
  for (ChunkState& state : model_.chunks) {
    if (state.saving != Saving::taking) state.saving = Saving::none;
  }
}

}  // namespace overspill::engine
