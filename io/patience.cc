#include "io/patience.h"

#include <cerrno>

namespace overspill::io {
namespace {

/// What a disk, or the way to it, may say once.
bool is_hiccup(int os_error) {
  switch (os_error) {
    case EIO:
    case ETIMEDOUT:
    case ENODATA:    // the medium
    case EREMOTEIO:  // the target
    case ENOLINK:    // the transport
    case EILSEQ:     // protection information
      return true;
    default:
      return false;
  }
}

}  // namespace

bool is_shortage(int os_error) {
  switch (os_error) {
    case ENOMEM:
    case ENOBUFS:
    case EAGAIN:
    case EBUSY:
      return true;
    default:
      return false;
  }
}

bool may_pass(int os_error, bool writes) {
  return is_shortage(os_error) || (!writes && is_hiccup(os_error));
}

bool may_pass_elsewhere(int os_error) {
  return is_hiccup(os_error) || os_error == ENOSPC || os_error == EDQUOT;
}

}  // namespace overspill::io
