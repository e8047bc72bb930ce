// torchrun ends all ranks with SIGTERM as soon as one has died: faster than those can say which one it was.
#pragma once

namespace overspill::bindings {

/// From now on SIGTERM ends this process `seconds` later; whatever happens meanwhile, an error that names the
/// lost rank above all, is still printed. Once a process. False, and nothing changed, where SIGTERM has a
/// handler or is ignored. Not inherited: SIGTERM ends a forked child at once, and it alone.
bool linger_when_terminated(double seconds);

}  // namespace overspill::bindings
