// Work on files by several threads: several requests are in flight while others are checked and converted.
#pragma once

#include <cstdint>
#include <functional>

namespace overspill::engine {

/// Calls work(worker, item) once for each item in [0, items), on up to `workers` threads of which each has
/// its number in [0, workers), and returns when all have returned. Items begin in their order. work() returns
/// the bytes that it has done; report(bytes so far) is called with them on the calling thread, which does no
/// work, and never twice with the same. Where work() throws, no item begins any more, and of the exceptions
/// that of the lowest item is rethrown; what report() throws is rethrown before any of them. Throws
/// io::StoreError{threads} where not one thread can be started; fewer than `workers` will do.
void side_by_side(int64_t items, int workers, const std::function<int64_t(int, int64_t)>& work,
                  const std::function<void(int64_t)>& report);

}  // namespace overspill::engine
