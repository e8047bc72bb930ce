// How the ranks of a save in the background hear of one another while training uses their transport: by files
// in the folder that the save fills. Each rank has one, locked while it works, so that a rank that died is
// known.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "io/unique_fd.h"

namespace overspill::engine {

inline constexpr const char* kReportFile = "save.txt";  // behind a rank's prefix

/// Rank 0 has said that the folder will not get its name.
class GivenUp : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// Of one rank, on one thread. Its file is locked until it is destroyed: whose is not has left, or died. On a
/// file system without locks a death stays unknown.
class RankReports {
 public:
  /// Makes this rank's file. Throws CheckpointError.
  RankReports(const std::filesystem::path& partial, int rank, int ranks);
  ~RankReports();
  RankReports(const RankReports&) = delete;
  RankReports& operator=(const RankReports&) = delete;

  /// Says that this rank has written its part. Throws CheckpointError where it cannot be said.
  void say_written(const std::string& words);
  /// Says why not. Where that cannot be said, the others take this rank for dead.
  void say_failed(const std::string& why) noexcept;

  // Of rank 0. `go_on` is called now and then, and may throw.
  /// Waits for the words of all other ranks; those of rank 0 are empty. Throws CheckpointError that names a
  /// rank which failed or died.
  std::vector<std::string> gather(const std::function<void()>& go_on) const;
  /// Waits until all other ranks have left.
  void wait_for_others(const std::function<void()>& go_on) const;
  /// Removes the files of all other ranks; then, when the folder has its name, that of rank 0.
  void remove_others() const;
  void remove_own(const std::filesystem::path& folder) const;

  // Of the others.
  /// Waits until rank 0 has given the folder its name `folder`. Throws GivenUp where rank 0 says that it
  /// never will, CheckpointError where it died or cannot be heard.
  void wait_for_name(const std::filesystem::path& folder, const std::function<void()>& go_on) const;

 private:
  enum class Report : uint8_t { none, written, failed, dead };
  struct Heard {
    Report report = Report::none;
    std::string words;
  };
  bool say(const char* kind, const std::string& words) noexcept;
  std::filesystem::path file_of(int rank) const;
  Heard hear(int rank) const;
  bool is_there(int rank) const;

  const std::filesystem::path partial_;
  const int rank_;
  const int ranks_;
  io::UniqueFd own_;
};

}  // namespace overspill::engine
