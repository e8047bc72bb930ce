// Which lock guards what, said so that Clang checks it (tools/locks.py, a part of `make lint`). The names are
// those of Clang's documentation (ThreadSafetyAnalysis.html), which says what each means. To other compilers
// they say nothing.
#pragma once

#if defined(__clang__)
#define OVERSPILL_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define OVERSPILL_THREAD_SAFETY(attribute)
#endif

// Of types.
#define CAPABILITY(name) OVERSPILL_THREAD_SAFETY(capability(name))
#define SCOPED_CAPABILITY OVERSPILL_THREAD_SAFETY(scoped_lockable)

// Of members: read and written with the lock; what they point to is.
#define GUARDED_BY(mutex) OVERSPILL_THREAD_SAFETY(guarded_by(mutex))
#define PT_GUARDED_BY(mutex) OVERSPILL_THREAD_SAFETY(pt_guarded_by(mutex))
// Of locks: in which order they are taken.
#define ACQUIRED_BEFORE(...) OVERSPILL_THREAD_SAFETY(acquired_before(__VA_ARGS__))
#define ACQUIRED_AFTER(...) OVERSPILL_THREAD_SAFETY(acquired_after(__VA_ARGS__))

// Of functions and lambdas: called with the lock, called with it and may give it up for a while, called
// without it, takes it, gives it up, gives it out, knows that it is held. Whoever calls what may give the
// lock up finds it held again, also after an exception, and what it guards changed by others.
#define REQUIRES(...) OVERSPILL_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define MAY_RELEASE(...) OVERSPILL_THREAD_SAFETY(requires_capability(__VA_ARGS__))
#define REQUIRES_SHARED(...) OVERSPILL_THREAD_SAFETY(requires_shared_capability(__VA_ARGS__))
#define EXCLUDES(...) OVERSPILL_THREAD_SAFETY(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) OVERSPILL_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define ACQUIRE_SHARED(...) OVERSPILL_THREAD_SAFETY(acquire_shared_capability(__VA_ARGS__))
#define RELEASE(...) OVERSPILL_THREAD_SAFETY(release_capability(__VA_ARGS__))
#define RELEASE_SHARED(...) OVERSPILL_THREAD_SAFETY(release_shared_capability(__VA_ARGS__))
#define RETURN_CAPABILITY(mutex) OVERSPILL_THREAD_SAFETY(lock_returned(mutex))
#define ASSERT_CAPABILITY(mutex) OVERSPILL_THREAD_SAFETY(assert_capability(mutex))

// Of a function that is right for a reason which Clang cannot follow. A comment gives the reason.
#define NO_THREAD_SAFETY_ANALYSIS OVERSPILL_THREAD_SAFETY(no_thread_safety_analysis)
