// Who holds a job's lock: what a run writes into its lock file, and what that says about a lock that is free.
#pragma once

#include <string>
#include <string_view>

namespace overspill::io {

/// Content of a lock file while a run removes a dead run's folder. It names no holder.
inline constexpr std::string_view kRemoving = "removing";

/// Fields that are not known are empty.
struct LockHolder {
  std::string process;        // its number, in its own namespace
  std::string host;           // name of the machine
  std::string boot;           // the kernel's boot id: no two running kernels have the same
  std::string pid_namespace;  // of the process

  static LockHolder self();
  /// Reads also the lock file of an older version, which names the process alone. For kRemoving all fields
  /// are empty.
  static LockHolder parse(std::string_view text);
  std::string text() const;

  /// For errors, as seen from this process: "process 7", "process 2 of another container on this machine", …
  std::string description() const;
  bool on_this_machine() const;
};

/// Whether one machine alone can work on the open file's file system, so that a lock that is free here is
/// free everywhere. False for what may be a network file system: some carry locks between machines, some do
/// not, and none says which.
bool is_of_one_machine(int fd);

}  // namespace overspill::io
