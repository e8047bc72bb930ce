// How loops that set a benchmark's limit are compiled: for the widest vectors too, and into one another.
#pragma once

#if defined(__x86_64__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif
#define INLINE inline __attribute__((always_inline))
