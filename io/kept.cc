#include "io/kept.h"

#include <mutex>
#include <utility>
#include <vector>

namespace overspill::io {

void keep_for_ever(std::shared_ptr<void> kept) {
  static std::mutex mutex;
  static auto& all = *new std::vector<std::shared_ptr<void>>;  // reachable, and never destroyed
  const std::lock_guard lock(mutex);
  all.push_back(std::move(kept));
}

}  // namespace overspill::io
