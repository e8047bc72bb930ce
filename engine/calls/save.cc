// Checkpoints of all ranks (docs/store.md), as passes: what every rank has made durable is named by one
// manifest, or by none.
#include <fmt/format.h>

#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/calls/calls.h"
#include "engine/calls/machine.h"
#include "engine/checkpoint/background_save.h"

namespace overspill::engine {
namespace {

constexpr int64_t kWordsMax = int64_t{1} << 20;  // of an error's text

/// A rank says how many bytes it will send, and memory is taken for so many.
void check_announced(int rank, int64_t bytes) {
  if (bytes >= 0 && bytes <= kWordsMax) return;
  throw CommunicatorError(fmt::format(
      "rank {} announces {} bytes about its part of a checkpoint; {} are the most", rank, bytes, kWordsMax));
}

}  // namespace

/// All ranks tell one another what their pass came to. Where one has failed all throw: it its own error, the
/// others one that names it. Returns what the ranks say, by rank; rank 0 alone hears it.
std::vector<std::string> Machine::tell(Meeting meeting, const std::exception_ptr& error,
                                       const std::string& words) {
  const int slices = setup.layout.slices;
  const int own = setup.layout.slice;
  std::vector<std::string> heard(static_cast<size_t>(slices));
  if (slices == 1) {
    if (error) std::rethrow_exception(error);
    heard[0] = words;
    return heard;
  }
  const std::string says = (error ? words_of(error) : words).substr(0, kWordsMax);
  std::vector<int64_t> head(static_cast<size_t>(slices) * 2);  // failed, bytes
  rounds.meet(meeting, ++looks, [&] {
    head[own * 2] = error ? 1 : 0;
    head[own * 2 + 1] = static_cast<int64_t>(says.size());
    ranks.communicator->all_gather(std::as_writable_bytes(std::span(head)));
    bool failed = false;
    for (int rank = 0; rank < slices; ++rank) {
      failed = failed || head[rank * 2] != 0;
      check_announced(rank, head[rank * 2 + 1]);
    }
    std::vector<std::span<const std::byte>> send(static_cast<size_t>(slices));
    std::vector<std::span<std::byte>> receive(static_cast<size_t>(slices));
    for (int rank = 0; rank < slices; ++rank) {
      if (rank == own) continue;
      if (failed ? error != nullptr : rank == 0) send[rank] = std::as_bytes(std::span(says));
      if (failed ? head[rank * 2] != 0 : own == 0) {
        heard[rank].resize(static_cast<size_t>(head[rank * 2 + 1]));
        receive[rank] = std::as_writable_bytes(std::span(heard[rank]));
      }
    }
    ranks.communicator->exchange(send, receive);
  });
  if (error) std::rethrow_exception(error);
  for (int rank = 0; rank < slices; ++rank) {
    if (head[rank * 2] != 0) throw CheckpointError(fmt::format("rank {}: {}", rank, heard[rank]));
  }
  heard[own] = words;
  return heard;
}

void Machine::take_all(RankPart& part) {
  MutexLock lock(core.mutex());
  core.check();
  snapshot.mark(part);
  lock.unlock();
  snapshot.take_all();
}

/// What lives on the device changes without the updater: it is taken now.
void Machine::mark(RankPart& part) {
  intake.finish();  // else it might let guesses begin while others are taken back
  MutexLock lock(core.mutex());
  core.check();
  updater.take_back_all();
  snapshot.mark(part);
  for (int32_t chunk = 0; std::cmp_less(chunk, model.chunks.size()); ++chunk) {
    if (setup.lives_on_device(setup.layout.chunks[chunk].unit)) snapshot.before_change(chunk);
  }
  background.spoil(nullptr);  // what was said of the save before
  edits_may_be_saved = !edits_at_home;
  if (!edits_at_home) return;
  lock.unlock();
  try {  // this model's forward changes weights where they live: they are taken before it runs
    snapshot.take_all();
  } catch (...) {
    lock.lock();
    snapshot.fail(std::current_exception());  // the background's thread tells of it, as of every other error
  }
}

Manifest Machine::head(std::vector<ManifestUnit> units) const {
  Manifest manifest;
  manifest.step = steps;
  manifest.skipped_steps = skipped_steps;
  manifest.world = setup.layout.slices;
  manifest.units = std::move(units);
  return manifest;
}

void Machine::save(const std::filesystem::path& folder, const WriteBeside& write_beside) {
  const bool first = setup.layout.slice == 0;
  bool prepared = false;
  try {
    tell(Meeting::save, attempt([&] {
           if (!first) return;
           keeper.prepare(folder);
           prepared = true;
         }));
    // Beyond this point there is a folder that nobody takes for a checkpoint.

    WrittenPart part;
    const std::exception_ptr unwritten = attempt([&] {
      take_all(keeper.begin_part(folder));
      part = keeper.finish_part(folder);
    });
    const std::vector<std::string> parts = tell(Meeting::save, unwritten, words_of(part.index));
    // Beyond this point every rank's data is durable, and pinned.

    tell(Meeting::save, attempt([&] {
           if (!first) return;
           Manifest manifest = head(std::move(part.units));
           manifest.indexes = indexes_of_words(parts, setup.layout.shards);
           manifest.extra_json = write_beside(keeper.unfinished(folder));
           keeper.complete(folder, manifest);
         }));
  } catch (const EngineFailed&) {
    keeper.give_up();
    throw;
  } catch (...) {
    give_up(folder, prepared);
    throw;
  }
  keeper.keep(folder);
}

/// All ranks, after the same error: the folder goes before the pins of what it has.
void Machine::give_up(const std::filesystem::path& folder, bool prepared) {
  const bool stalled = io::is_stalled(std::current_exception());
  if (prepared && !stalled) keeper.remove(folder);
  if (setup.layout.slices > 1) rounds.meet(Meeting::save, ++looks, [] {});
  stalled ? keeper.leave() : keeper.give_up();
}

void Machine::save_in_background(const std::filesystem::path& folder, const WriteBeside& write_beside) {
  const bool first = setup.layout.slice == 0;
  bool prepared = false;
  Manifest manifest = head({});
  try {
    tell(Meeting::save, attempt([&] {
           if (!first) return;
           keeper.prepare(folder);
           prepared = true;
           manifest.extra_json = write_beside(keeper.unfinished(folder));
         }));
    RankPart* part = nullptr;
    tell(Meeting::save, attempt([&] {
           background.announce(folder);
           part = &keeper.begin_part(folder);
         }));
    // Beyond this point each rank's report says how its part ends.
    mark(*part);
  } catch (const EngineFailed&) {
    background.withdraw();
    keeper.give_up();
    throw;
  } catch (...) {
    background.withdraw();
    give_up(folder, prepared);
    throw;
  }
  background.start(folder, std::move(manifest));
}

void Machine::forget_snapshot(const std::string& name) {
  edits_at_home = true;
  if (!background.under_way() || !edits_may_be_saved) return;
  const auto error = std::make_exception_ptr(
      CheckpointError(fmt::format("{} was changed in place while the save took the weights: save before such "
                                  "a change, or wait for the save "
                                  "(wait_for_save, or blocking=True)",
                                  name)));
  background.spoil(error);
  if (snapshot.under_way()) snapshot.fail(error);
}

void Machine::wait_for_save() {
  if (!background.started()) return;
  tell(Meeting::save, background.join());
}

}  // namespace overspill::engine
