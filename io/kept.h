// What must not be freed although nobody uses it any more: memory that a disk which does not answer may still
// write into, and the threads that wait for it.
#pragma once

#include <memory>

namespace overspill::io {

/// Until the process ends.
void keep_for_ever(std::shared_ptr<void> kept);

}  // namespace overspill::io
