#include "io/patience.h"

#include <cerrno>

namespace overspill::io {

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
  if (is_shortage(os_error)) return true;
  if (writes) return false;
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

}  // namespace overspill::io
