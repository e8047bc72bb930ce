// A save that goes on while training does: a thread takes the snapshot's chunks, makes this rank's part
// durable and, on rank 0, gives the folder its name when all ranks have written theirs. One at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/checkpoint/keeper.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/rank_reports.h"
#include "engine/core/core.h"
#include "engine/plan/setup.h"
#include "engine/states/snapshot.h"

namespace overspill::engine {

class BackgroundSave {
 public:
  BackgroundSave(const Setup& setup, Core& core, Snapshot& snapshot, CheckpointKeeper& keeper)
      : setup_(setup), core_(core), snapshot_(snapshot), keeper_(keeper) {}
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;
  ~BackgroundSave() { join(); }

  /// Makes this rank's report, with several ranks: the folder has been prepared. Throws CheckpointError.
  void announce(const std::filesystem::path& folder);
  /// Drops what announce() made: the save failed before it began.
  void withdraw() noexcept { reports_.reset(); }
  /// Begins to take what the snapshot has marked into the keeper's part. `manifest`: without units, what rank
  /// 0 writes.
  void start(const std::filesystem::path& folder, Manifest manifest);

  /// Whether one was started whose end nobody has asked for.
  bool started() const { return thread_.joinable() || error_ != nullptr; }
  /// What it takes is not what it was to take: it fails with `error`, unless its folder has its name already.
  void spoil(std::exception_ptr error) REQUIRES(engine_mutex) { spoiled_ = std::move(error); }
  /// Waits for its end, and lets copies go at full speed meanwhile. Returns what went wrong, once; null:
  /// nothing.
  std::exception_ptr join() noexcept;

  /// Whether one is under way now; any thread may ask.
  bool under_way() const { return under_way_; }

 private:
  void run(const std::filesystem::path& folder, Manifest manifest) noexcept;
  void save(const std::filesystem::path& folder, Manifest manifest);
  void end(const std::filesystem::path& folder) noexcept;
  void check() const EXCLUDES(engine_mutex);
  void check_unspoiled() const EXCLUDES(engine_mutex);
  void let_go_of_pins() noexcept;

  const Setup& setup_;
  Core& core_;
  Snapshot& snapshot_;
  CheckpointKeeper& keeper_;
  std::optional<RankReports> reports_;
  std::thread thread_;
  std::exception_ptr error_;  // of the thread, for join()
  bool said_written_ = false;
  std::exception_ptr spoiled_ GUARDED_BY(engine_mutex);
  std::atomic<bool> under_way_ = false;
};

/// What an exception says.
std::string words_of(const std::exception_ptr& error);
/// An index in words for rank 0; and the indexes of all ranks from their words, by rank: a rank without one
/// says nothing. Throws CheckpointError.
std::string words_of(const std::optional<IndexFile>& index);
std::vector<IndexFile> indexes_of_words(std::span<const std::string> words, int64_t shards);

}  // namespace overspill::engine
