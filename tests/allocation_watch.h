// Replaces operator new of the program that links it, to see who asks the heap for memory.
#pragma once

#include <cstdint>

namespace overspill::testing {

/// Requests of all threads between these two. What stop() returns is their number; where it is not zero their
/// call sites are printed, for addr2line -Cfie.
void watch_allocations();
int64_t stop_watching_allocations();

}  // namespace overspill::testing
