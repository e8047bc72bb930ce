// Helpers that all calls of Engine share. Not for users.
#pragma once

#include <fmt/format.h>

#include <exception>
#include <stdexcept>
#include <string>

#include "engine/calls/machine.h"

namespace overspill::engine {

/// Throws std::invalid_argument, which names `what`, where there are several ranks.
void require_world_one(const Layout& layout, const char* what);

/// Throws std::invalid_argument unless `bytes` are those of the segment's elements.
void check_size(const Segment& segment, size_t bytes, int64_t element_bytes);

/// Several optimizers over one model need a world of one rank. Throws std::invalid_argument.
void require_whole_or_one(const Machine& m, GroupRange range);

/// To be called before a gradient of the segment is changed or read: applies the pending scale of
/// clip_grad_norm() to the gradients that it was computed for. With several ranks a pending scale throws
/// std::invalid_argument.
void settle_clip(Machine& m, const Segment& segment);

/// Runs `apply`, which replaces weights or states. If it fails halfway, some are old and some new: the engine
/// fails.
template <class Change>
void change(Machine& m, const std::string& what, Change apply) {
  try {
    apply();
  } catch (const std::logic_error&) {
    throw;  // a mistake in the program, not a failing disk
  } catch (const std::exception& error) {
    const MutexLock guard(m.core.mutex());
    m.core.fail(fmt::format("{}: {}", what, error.what()));
    m.core.check();
  }
}

/// What `pass` throws, so that the other ranks can be told of it first; null where it returns.
template <class Do>
std::exception_ptr attempt(Do pass) {
  try {
    pass();
    return nullptr;
  } catch (const std::exception&) {
    return std::current_exception();
  }
}

/// For the report: while this object lives, the report counts the caller's time as spent in the engine.
class InCall {
 public:
  explicit InCall(Core& core) EXCLUDES(engine_mutex) : core_(core) {
    const MutexLock guard(core_.mutex());
    core_.meter.begin(Activity::call);
  }
  ~InCall() EXCLUDES(engine_mutex) {
    const MutexLock guard(core_.mutex());
    core_.meter.end(Activity::call);
  }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  Core& core_;
};

}  // namespace overspill::engine
