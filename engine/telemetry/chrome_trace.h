// A journal as a picture: JSON in the Trace Event Format, which Perfetto (ui.perfetto.dev) and
// chrome://tracing open. Every buffer carries the name of its layer.
//
// It has one track for the caller (waits, acquires, steps), one per slot of the ring (read, update, write),
// and spans for gathered units, gradients in flight and updates of chunks on the host. For a device with
// streams there is one track for copies in each direction and one per queue that computes, timed by the
// device's events.
#pragma once

#include <ostream>
#include <span>

#include "engine/partition/layout.h"
#include "engine/telemetry/journal.h"

namespace overspill::engine {

/// Entries in the order in which they were noted. A span that had not ended is closed at the last entry; an
/// end whose beginning was not recorded is left out.
void write_chrome_trace(std::ostream& out, const Layout& layout, std::span<const JournalEntry> entries,
                        std::span<const DeviceSpan> device = {});

}  // namespace overspill::engine
