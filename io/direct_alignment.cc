#include "io/direct_alignment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/stat.h>  // not <sys/stat.h>: older C libraries' struct statx lacks the fields
#include <sys/syscall.h>
#include <unistd.h>

#include "io/store.h"

namespace overspill::io {

std::optional<DirectAlignment> direct_alignment_of(int fd) {
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) != 0) return std::nullopt;
  if ((info.stx_mask & STATX_DIOALIGN) == 0) return std::nullopt;
  return DirectAlignment{info.stx_dio_mem_align, info.stx_dio_offset_align};
#else
  static_cast<void>(fd);
  return std::nullopt;
#endif
}

std::string refusal_of(const DirectAlignment& alignment) {
  if (alignment.mem_bytes == 0 || alignment.offset_bytes == 0) return "O_DIRECT refused";
  if (alignment.mem_bytes <= kBlockBytes && alignment.offset_bytes <= kBlockBytes) return "";
  return fmt::format("O_DIRECT wants alignment to {} bytes in memory and {} in the file, blocks have {}",
                     alignment.mem_bytes, alignment.offset_bytes, kBlockBytes);
}

}  // namespace overspill::io
