// A checkpoint into an engine (docs/store.md). All ranks load it, or none.
#include <fmt/format.h>

#include <numeric>
#include <string>
#include <vector>

#include "engine/calls/calls.h"
#include "engine/calls/machine.h"
#include "engine/engine.h"

namespace overspill::engine {
namespace {

using Loading = CheckpointKeeper::Loading;

}  // namespace

void Machine::check_loaded() const {
  if (half_loaded) throw CheckpointError(half_loaded_by);
}

Manifest Machine::open(const std::filesystem::path& folder) {
  Manifest manifest;
  tell(Meeting::load, attempt([&] { manifest = keeper.open(folder); }));
  return manifest;
}

/// A run that has made steps, or whose weights and states came from elsewhere, would lose them to a damaged
/// checkpoint: all ranks compare all bytes first.
void Machine::load_verified(const std::filesystem::path& folder, const Manifest& manifest) {
  tell(Meeting::load, attempt([&] { keeper.verify(folder, manifest); }));
  replace_all(folder, [&] { keeper.load(folder, manifest, Loading::verified); });
}

/// Of an engine as it was made nothing can be lost that cannot be made again: each byte is read once, and
/// compared on its way.
void Machine::load_once(const std::filesystem::path& folder, const Manifest& manifest) {
  try {
    std::exception_ptr damage;
    replace_all(folder, [&] {
      try {
        keeper.load(folder, manifest, Loading::unread);
      } catch (const CheckpointError&) {
        damage = std::current_exception();
      }
    });
    tell(Meeting::load, damage);
  } catch (const CheckpointError&) {
    half_loaded_by = fmt::format(
        "a part of {} was loaded before damage was found in it, so weights and states are of two models. "
        "Load all of another checkpoint: load_checkpoint(folder), or with fall_back=True the newest that is "
        "whole. Or make a new engine",
        folder.string());
    half_loaded = true;
    throw;
  } catch (const EngineFailed&) {
    half_loaded = false;  // the failure says more
    throw;
  }
  half_loaded = false;
}

template <class Load>
void Machine::replace_all(const std::filesystem::path& folder, Load load) {
  intake.finish();
  MutexLock lock(core.mutex());
  const Rounds::Change changing(rounds);
  std::vector<int32_t> all(model.units.size());
  std::iota(all.begin(), all.end(), 0);
  prepare_to_change(all);
  lock.unlock();
  gradients.clear();
  forget_clip();
  change(*this, "loading " + folder.string() + " was cut off", load);
  lock.lock();
}

std::string Engine::load(const std::filesystem::path& folder) {
  Machine& m = open_machine();
  m.wait_for_save();
  m.keeper.require_room_to_change();
  const Manifest manifest = m.open(folder);
  if (m.half_loaded || (m.steps == 0 && m.skipped_steps == 0 && !m.touched)) {
    m.load_once(folder, manifest);
  } else {
    m.load_verified(folder, manifest);
  }
  const MutexLock lock(m.core.mutex());
  m.steps = manifest.step;
  m.skipped_steps = manifest.skipped_steps;
  m.handed_over = true;
  m.touched = true;
  return manifest.extra_json;
}

}  // namespace overspill::engine
