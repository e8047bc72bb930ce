#define OVERSPILL_XXH3 xxh3_avx2
#include "io/xxh3.inl"
