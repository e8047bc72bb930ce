#include "io/store_base.h"

#include <fmt/format.h>

#include <limits>
#include <utility>

namespace overspill::io {

int64_t checked_extent_bytes(int64_t bytes) {
  if (bytes > 0 && bytes <= std::numeric_limits<int64_t>::max() - kBlockBytes)
    return round_up_to_block(bytes);
  throw StoreError({.kind = ErrorKind::invalid,
                    .operation = Operation::reserve,
                    .detail = fmt::format("an extent of {} bytes is wanted", bytes)});
}

StoreError no_room(const SlabSpace& space, int64_t bytes, std::string path) {
  return StoreError(
      {.kind = ErrorKind::no_space,
       .operation = Operation::reserve,
       .path = std::move(path),
       .detail = fmt::format("an extent of {} bytes is wanted; {} of {} reserved bytes are allocated", bytes,
                             space.allocated_bytes(), space.limit_bytes())});
}

}  // namespace overspill::io
