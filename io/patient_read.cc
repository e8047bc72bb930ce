#include "io/patient_read.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "io/files.h"

namespace overspill::io {

ssize_t read_some(int fd, std::span<std::byte> to, int64_t offset, const std::filesystem::path& path) {
  for (int tries = 1;;) {
    const ssize_t got = ::pread(fd, to.data(), to.size(), offset);
    if (got >= 0) return got;
    const int os_error = errno;
    if (os_error == EINTR) continue;
    if (tries > kReadAgain.tries_max || !may_pass(os_error, false)) {
      errno = os_error;
      return -1;
    }
    warn_once(
        fmt::format("{}: a read failed ({}) and is tried again", path.string(), std::strerror(os_error)));
    std::this_thread::sleep_for(kReadAgain.wait_before(tries++));
  }
}

}  // namespace overspill::io
