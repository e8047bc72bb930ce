#include "io/checksum.h"

// The library's own choice among its vector widths, made at run time, where it was built with it.
#ifdef OVERSPILL_XXH_DISPATCH
#include <xxh_x86dispatch.h>
#else
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

namespace overspill::io {

uint64_t checksum_block(std::span<const std::byte> block) {
  return XXH3_64bits(block.data(), block.size());
}

}  // namespace overspill::io
