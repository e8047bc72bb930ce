// Which process an object belongs to. A forked child has a copy of every object and none of its threads:
// locks may be held for ever there, and joining waits for ever.
#pragma once

#include <sys/types.h>

namespace overspill::io {

/// A member of whatever has threads. No system call after construction.
class OwnProcess {
 public:
  OwnProcess();
  /// False in a forked child of the process that made it.
  bool here() const { return forks_ == forks(); }
  pid_t pid() const { return pid_; }

 private:
  static int forks();  // that lie between the first process and this one

  int forks_;
  pid_t pid_;
};

}  // namespace overspill::io
