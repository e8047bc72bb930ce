// Typed errors of the store. Inside io/ an error is a value (`Error`); at the API it is thrown as
// `StoreError`.
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

namespace overspill::io {

enum class ErrorKind : uint8_t {
  no_space,     // ENOSPC: the file system is full
  quota,        // EDQUOT, EFBIG, EMFILE: a limit below what the machine has
  threads,      // the machine gives this process no further thread
  device,       // EIO and kin: the device failed the transfer
  no_memory,    // ENOMEM, ENOBUFS: the machine's memory, not the disk's
  busy,         // EAGAIN, EBUSY, however often it was asked
  truncated,    // the file ends before the extent does
  vanished,     // ENOENT, ESTALE, ENXIO, ENOTCONN: the path is gone
  corrupt,      // a checksum differs
  denied,       // EACCES, EPERM, EROFS
  locked,       // another live run holds the folder
  unsupported,  // the kernel or file system refuses the operation
  invalid,      // a caller's mistake: length, alignment, unknown extent
  stalled,      // no answer for longer than the caller allows; the kernel may still write into the memory
  ring,         // io_uring itself failed
  cancelled,    // the store is shutting down
};

enum class Operation : uint8_t { start_thread, open, reserve, read, write, sync, link, remove };
const char* name_of(Operation operation);

/// What went wrong, where, and what to do. `message()` names operation, path, offset, length, cause and way
/// out.
struct Error {
  ErrorKind kind = ErrorKind::device;
  Operation operation = Operation::read;
  int os_error = 0;  // errno value, 0 where none applies
  std::string path{};
  int64_t offset_bytes = 0;
  int64_t length_bytes = 0;
  std::string detail{};  // what decided it, e.g. expected and found checksum

  std::string message() const;
  /// The same without the way out.
  std::string cause() const;
};

/// Of a run of bytes that reads differently from what was written.
Error corrupt(std::string path, int64_t offset_bytes, int64_t length_bytes, uint64_t expected,
              uint64_t found);

/// Maps an errno value onto a kind; every value has one (unknown ones are `device`).
ErrorKind kind_of_errno(int os_error);

class StoreError : public std::runtime_error {
 public:
  explicit StoreError(Error error) : std::runtime_error(error.message()), error_(std::move(error)) {}
  const Error& error() const { return error_; }

 private:
  Error error_;
};

/// Whether the exception is a StoreError of a disk that does not answer. Whoever removes files there then
/// waits for that disk.
bool is_stalled(const std::exception_ptr& error);

}  // namespace overspill::io
