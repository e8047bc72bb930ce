// Stands in for io/checksum.cc in bench_io_unchecked, so that what checksums cost can be measured while the
// store itself has no way to go without them.
#include "io/checksum.h"

namespace overspill::io {

uint64_t checksum_block(std::span<const std::byte>) {
  return 0;
}

}  // namespace overspill::io
