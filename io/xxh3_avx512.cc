#define OVERSPILL_XXH3 xxh3_avx512
#include "io/xxh3.inl"
