// Files of checkpoints that cannot be written.
#pragma once

#include <fcntl.h>

#include <cstdint>
#include <utility>

#include "tests/engine/file_calls.h"

namespace overspill::testing {

/// Fails one call of a save.
class FailingFiles : public FileWatcher {
 public:
  void arm(int64_t calls_before, int os_error) {
    left_ = calls_before;
    os_error_ = os_error;
  }
  /// Whether it has failed one since.
  bool disarm() { return std::exchange(left_, -1) == -2; }
  bool syncs() const override { return false; }
  int failure_of(const FileCall& call) override {
    if (left_ < 0 || removes(call)) return 0;
    if (left_-- > 0) return 0;
    left_ = -2;
    return os_error_;
  }

 private:
  /// What a failed save has made goes away only if these succeed.
  static bool removes(const FileCall& call) {
    if (call.kind == FileCall::Kind::close || call.kind == FileCall::Kind::remove) return true;
    const bool looks_into = (call.flags & O_DIRECTORY) != 0 &&
                            ((call.flags & (O_PATH | O_NOFOLLOW)) != 0 || call.path.ends_with("/."));
    return call.kind == FileCall::Kind::open && looks_into;
  }

  int64_t left_ = -1;
  int os_error_ = 0;
};

}  // namespace overspill::testing
