#include "engine/checkpoint/background_save.h"

#include <fmt/format.h>

#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/base/engine_failed.h"
#include "io/say.h"
#include "io/stall_watch.h"

namespace overspill::engine {
std::string words_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

std::string words_of(const std::optional<IndexFile>& index) {
  return index ? fmt::format("{} {} {}", index->file, index->bytes, index->checksum) : "";
}

std::vector<IndexFile> indexes_of_words(std::span<const std::string> words, int64_t shards) {
  std::vector<IndexFile> indexes;
  for (size_t rank = 0; rank < words.size(); ++rank) {
    if (words[rank].empty()) continue;
    IndexFile index{.file = "", .bytes = 0, .checksum = 0, .shard = {static_cast<int64_t>(rank), shards}};
    std::istringstream in(words[rank]);
    if (!(in >> index.file >> index.bytes >> index.checksum)) {
      throw CheckpointError(
          fmt::format("rank {} says of its part of the checkpoint: '{:.100}'", rank, words[rank]));
    }
    indexes.push_back(std::move(index));
  }
  return indexes;
}

void BackgroundSave::announce(const std::filesystem::path& folder) {
  if (setup_.layout.slices == 1) return;
  reports_.emplace(CheckpointKeeper::unfinished(folder), setup_.layout.slice, setup_.layout.slices);
}

void BackgroundSave::start(const std::filesystem::path& folder, Manifest manifest) {
  under_way_ = true;
  said_written_ = false;
  keeper_.take_time();
  try {
    thread_ = std::thread([this, folder, manifest] { run(folder, manifest); });
  } catch (const std::system_error&) {  // the machine refuses threads
    run(folder, std::move(manifest));
  }
}

std::exception_ptr BackgroundSave::join() noexcept {
  keeper_.hurry();
  if (thread_.joinable()) thread_.join();
  return std::exchange(error_, nullptr);
}

void BackgroundSave::run(const std::filesystem::path& folder, Manifest manifest) noexcept {
  try {
    save(folder, std::move(manifest));
  } catch (...) {
    error_ = std::current_exception();
    end(folder);
  }
  reports_.reset();
  under_way_ = false;
}

void BackgroundSave::save(const std::filesystem::path& folder, Manifest manifest) {
  const auto go_on = [this] { check(); };
  snapshot_.take_all();
  WrittenPart part = keeper_.finish_part(folder);
  if (setup_.layout.slice == 0) {
    std::vector<std::string> words(1);
    if (reports_) {
      words = reports_->gather(go_on);
      reports_->remove_others();
    }
    words[0] = words_of(part.index);
    manifest.units = std::move(part.units);
    manifest.indexes = indexes_of_words(words, setup_.layout.shards);
    check_unspoiled();
    keeper_.complete(folder, manifest);
    if (reports_) reports_->remove_own(folder);
  } else {
    check_unspoiled();
    reports_->say_written(words_of(part.index));
    said_written_ = true;
    reports_->wait_for_name(folder, go_on);
  }
  keeper_.keep(folder);
}

/// Of a save that failed. Rank 0 removes the folder when no rank writes there any more.
void BackgroundSave::end(const std::filesystem::path& folder) noexcept {
  const std::string why = words_of(error_);
  const bool stalled = io::is_stalled(error_);
  try {
    if (reports_) reports_->say_failed(why);
    if (setup_.layout.slice == 0 && !stalled) {
      if (reports_) reports_->wait_for_others([this] { check(); });
      keeper_.remove(folder);
    }
  } catch (const std::exception&) {  // the engine has failed: nobody waits for anything
    keeper_.remove(folder);
  }
  let_go_of_pins();
  try {
    io::say_on_stderr(
        fmt::format("overspill: warning: the checkpoint {} could not be saved: {}", folder.string(), why));
  } catch (const std::exception&) {
  }
}

/// Rank 0 may give the folder its name although this rank has failed after its word: then its slabs need the
/// pins.
void BackgroundSave::let_go_of_pins() noexcept {
  bool given_up = !said_written_ && !io::is_stalled(error_);
  try {
    std::rethrow_exception(error_);
  } catch (const GivenUp&) {
    given_up = true;
  } catch (...) {
  }
  given_up ? keeper_.give_up() : keeper_.leave();
}

void BackgroundSave::check_unspoiled() const {
  const MutexLock lock(core_.mutex());
  if (spoiled_) std::rethrow_exception(spoiled_);
}

/// Throws EngineFailed where the other ranks may have gone.
void BackgroundSave::check() const {
  const MutexLock lock(core_.mutex());
  if (core_.failure.empty()) return;
  throw EngineFailed(core_.failure);
}

}  // namespace overspill::engine
