// How loops that measure a limit of the machine are compiled: for the widest vectors too, and into one
// another.
#pragma once

// The loader chooses the clone before a sanitizer's runtime is ready for the code that chooses.
#if defined(__x86_64__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif
#define INLINE inline __attribute__((always_inline))
