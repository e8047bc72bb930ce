// Keeps objects that are no longer used but must not be freed: memory that a hung disk may still write into,
// and threads that wait for that disk.
#pragma once

#include <memory>

namespace overspill::io {

/// Until the process ends.
void keep_for_ever(std::shared_ptr<void> kept);

}  // namespace overspill::io
