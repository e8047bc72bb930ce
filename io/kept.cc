#include "io/kept.h"

#include <utility>
#include <vector>

#include "base/mutex.h"

namespace overspill::io {

void keep_for_ever(std::shared_ptr<void> kept) {
  static Mutex mutex;
  static auto& all GUARDED_BY(mutex) =
      *new std::vector<std::shared_ptr<void>>;  // reachable, and never destroyed
  const MutexLock lock(mutex);
  all.push_back(std::move(kept));
}

}  // namespace overspill::io
