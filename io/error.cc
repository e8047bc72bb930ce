#include "io/error.h"

#include <fmt/format.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace overspill::io {
namespace {

const char* name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::no_space:
      return "no space left";
    case ErrorKind::quota:
      return "limit reached";
    case ErrorKind::threads:
      return "this process may have no more threads";
    case ErrorKind::device:
      return "device failure";
    case ErrorKind::no_memory:
      return "the kernel has no memory for it";
    case ErrorKind::busy:
      return "the kernel is too busy for it";
    case ErrorKind::truncated:
      return "file too short";
    case ErrorKind::vanished:
      return "path is gone";
    case ErrorKind::corrupt:
      return "corrupt data";
    case ErrorKind::denied:
      return "permission denied";
    case ErrorKind::locked:
      return "in use by another run";
    case ErrorKind::unsupported:
      return "not supported";
    case ErrorKind::invalid:
      return "invalid request";
    case ErrorKind::stalled:
      return "no answer";
    case ErrorKind::ring:
      return "io_uring failed";
    case ErrorKind::cancelled:
      return "cancelled";
  }
  return "unknown error";
}

const char* way_out_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::no_space:
      return "free space there, or add a path to the nvme budget";
    case ErrorKind::quota:
      return "raise the quota or the limit (ulimit -f of a file's size, ulimit -n of open files), or choose "
             "another path";
    case ErrorKind::threads:
      return "raise the limit of processes (ulimit -u, a container's pids.max)";
    case ErrorKind::device:
      return "check the disk (dmesg, smartctl); the last checkpoint is unaffected";
    case ErrorKind::no_memory:
      return "the disk is not at fault: free memory on this machine, or raise the limit of its container, "
             "then "
             "resume from the last checkpoint";
    case ErrorKind::busy:
      return "look for what keeps the device or the kernel busy (dmesg, iostat), then resume from the last "
             "checkpoint";
    case ErrorKind::truncated:
      return "something else shortened the file; resume from the last checkpoint";
    case ErrorKind::vanished:
      return "create the folder or mount it again";
    case ErrorKind::corrupt:
      return "the bytes are not used; resume from the last checkpoint and check the disk";
    case ErrorKind::denied:
      return "choose a folder this user may write to";
    case ErrorKind::locked:
      return "wait for that run, stop it, or give this run another job name (engine.job, --job)";
    case ErrorKind::unsupported:
      return "choose another file system or backend";
    case ErrorKind::invalid:
      return "correct the argument";
    case ErrorKind::stalled:
      return "check the disk, or its server and the connection to it (dmesg); end this process, since it "
             "keeps the memory that the disk may still write into, and resume from the last checkpoint";
    case ErrorKind::ring:
      return "set engine.io_backend to \"threads\", and resume from the last checkpoint";
    case ErrorKind::cancelled:
      return "the store was being closed";
  }
  return "";
}

}  // namespace

bool is_stalled(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const StoreError& known) {
    return known.error().kind == ErrorKind::stalled;
  } catch (...) {
    return false;
  }
}

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::start_thread:
      return "starting a thread";
    case Operation::open:
      return "open";
    case Operation::reserve:
      return "reserve";
    case Operation::read:
      return "read";
    case Operation::write:
      return "write";
    case Operation::sync:
      return "sync";
    case Operation::link:
      return "link";
    case Operation::remove:
      return "remove";
  }
  return "unknown operation";
}

std::string Error::cause() const {
  std::string text = fmt::format("store: {} failed: {}", name_of(operation), name_of(kind));
  if (!path.empty()) text += fmt::format(": {}", path);
  if (length_bytes > 0) text += fmt::format(" at offset {}, {} bytes", offset_bytes, length_bytes);
  if (os_error != 0)
    text += fmt::format(": {} (errno {})", std::generic_category().message(os_error), os_error);
  if (!detail.empty()) text += fmt::format(": {}", detail);
  return text;
}

std::string Error::message() const {
  const char* const way_out =
      os_error == EROFS
          ? "if it was mounted for writing, an error of its disk has stopped all writes (dmesg): check the "
            "disk and mount it again, or choose another folder"
          : way_out_of(kind);
  return fmt::format("{}; {}", cause(), way_out);
}

Error corrupt(std::string path, int64_t offset_bytes, int64_t length_bytes, uint64_t expected,
              uint64_t found) {
  return {.kind = ErrorKind::corrupt,
          .operation = Operation::read,
          .path = std::move(path),
          .offset_bytes = offset_bytes,
          .length_bytes = length_bytes,
          .detail = fmt::format("checksum {:016x} where {:016x} was written", found, expected)};
}

ErrorKind kind_of_errno(int os_error) {
  switch (os_error) {
    case ENOSPC:
      return ErrorKind::no_space;
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
      return ErrorKind::quota;
    case ENOMEM:
    case ENOBUFS:
      return ErrorKind::no_memory;
    case EAGAIN:
    case EBUSY:
      return ErrorKind::busy;
    case ENOENT:
    case ENOTDIR:
    case ESTALE:
    case ENXIO:
    case ENODEV:
    case ENOTCONN:      // a FUSE daemon died
    case ECONNABORTED:  // while this request was on its way
    case EHOSTDOWN:     // a server of a network file system is gone
    case EHOSTUNREACH:
      return ErrorKind::vanished;
    case EACCES:
    case EPERM:
    case EROFS:
      return ErrorKind::denied;
    case ENOSYS:
    case EOPNOTSUPP:
      return ErrorKind::unsupported;
    case EINVAL:
    case EBADF:
    case EFAULT:
    case ENAMETOOLONG:
      return ErrorKind::invalid;
    case ECANCELED:
      return ErrorKind::cancelled;
    default:
      return ErrorKind::device;
  }
}

}  // namespace overspill::io
