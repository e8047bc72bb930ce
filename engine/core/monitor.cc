#include "engine/core/monitor.h"

#include <fmt/format.h>

#include <stdexcept>

#include "engine/base/engine_failed.h"

namespace overspill::engine {

void Monitor::fail(const std::string& cause) {
  if (failure.empty()) {
    this->cause = cause;
    failure = cause + (last_checkpoint.empty()
                           ? ". No checkpoint was saved in this run"
                           : fmt::format(". The last complete checkpoint is {}", last_checkpoint));
  }
  changed.notify_all();
}

void Monitor::check() {
  if (failure.empty()) return;
  ++told;
  if (failure == kClosed) throw std::invalid_argument(failure + " by another thread while this call waited");
  throw EngineFailed("the engine has failed and holds no consistent weights: " + failure);
}

}  // namespace overspill::engine
