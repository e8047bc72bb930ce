#define OVERSPILL_XXH3 xxh3_portable
#include "io/xxh3.inl"
