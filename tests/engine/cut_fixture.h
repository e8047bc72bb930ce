// A run that trains, saves and deletes checkpoints while every file call is logged, and what a power cut
// after any of these calls leaves of its checkpoints.
#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine/collectives/communicator.h"
#include "engine/engine.h"
#include "tests/engine/cut_disk.h"

namespace overspill::testing {

/// Units in two formats, and a frozen one; `rows` of the largest.
std::vector<engine::UnitSpec> cut_units(int64_t rows = 40);

/// An empty folder in memory, where the machine has room for files there.
std::filesystem::path cut_folder(const std::string& name);

struct CutCase {
  enum class Saves : uint8_t { blocking, in_background };
  const char* name;
  engine::Placement placement;
  const char* store;
  int world = 1;
  bool links = true;  // the file systems have hard links
  size_t stride = 1;  // of the calls that are lost or torn alone, every so many
  int draws = 4;      // of calls that are lost or torn together, for each cut
  int paths = 1;      // of the store, each a file system; checkpoints lie on that of the first
  Saves saves = Saves::blocking;
};

/// What a cut may do to a checkpoint depends on how many calls were made before it.
struct SavedInCut {
  std::string name;
  int step = 0;                      // of its contents
  size_t begun = 0;                  // when the save was called
  size_t after = 0;                  // so many calls it is there
  size_t deleted = size_t{1} << 60;  // from then on it is taken apart
  std::vector<std::filesystem::path> parts{};
  std::vector<float> contents{};
};

/// Training and a save in the background take turns: before each of its calls that make something durable or
/// give it a name, the save waits for a write of training. Else it might be over before training goes on.
class DiskInTurns final : public Disk {
 public:
  using Disk::Disk;
  void begin_turns() { set_turns(true); }
  void end_turns() { set_turns(false); }
  int failure_of(const FileCall& call) override;
  void done(const FileCall& call, std::span<const std::byte> data) override;
  /// Threads that call the engine never wait for their turn.
  static void let_this_thread_go_on();

 private:
  void set_turns(bool on);

  std::mutex turns_mutex_;
  std::condition_variable changed_;
  bool in_turns_ = false;
  int64_t written_ = 0;  // times that training has written
};

class Cut : public ::testing::TestWithParam<CutCase> {
 protected:
  void TearDown() override;

  /// Trains, saves twice, deletes the first, saves again, trains; every call is in the log.
  void record();

  /// Empty, or what is wrong with the disk that this cut leaves.
  std::string wrong(const Disk& disk, size_t calls, const std::set<size_t>& lost,
                    const std::set<size_t>& torn = {});

  /// How many writes of training lie between the calls of this save.
  int64_t trained_during(const SavedInCut& saved) const;
  static std::set<size_t> all_of(const std::vector<size_t>& calls) { return {calls.begin(), calls.end()}; }

  std::vector<std::filesystem::path> nvme() const;

  std::filesystem::path root_ = cut_folder("disk");
  DiskInTurns disk_{root_};
  std::vector<SavedInCut> saved_;
  size_t before_two_ = 0, after_two_ = 0, end_ = 0;
  int64_t cuts_ = 0;

 private:
  class Rank;
  std::vector<engine::UnitSpec> units() const;
  engine::Config config_of(int rank) const;
  std::unique_ptr<engine::Engine> engine_of(int rank, std::unique_ptr<engine::Communicator> ranks) const;
  void note_contents(const std::vector<engine::StepResult>& results);
  void expect_all_was_seen() const;
  std::string opens(const SavedInCut& saved);
  std::string part_that_nobody_names() const;
  engine::Engine& reader();

  std::unique_ptr<engine::Engine> reader_;
};

}  // namespace overspill::testing
