// Backends, which carry pieces to the kernel: io_uring, or a few threads with pread and pwrite.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "io/piece_queue.h"

namespace overspill::io {

/// Works on a queue from construction to destruction, on its own thread or threads. The destructor returns
/// once every transfer pushed before stop() has completed; the queue must be stopped before. One whose queue
/// was given up is never destroyed: a thread of it may hang in the kernel.
class Backend {
 public:
  virtual ~Backend() = default;
  /// Its threads end once the queue is stopped and nothing is on its way; PieceQueue::wait_for_threads()
  /// waits.
  virtual void end() {}
  /// After a push.
  virtual void wake() = 0;
  /// Returns once the kernel has taken or dropped the memory. Not to be called from a completion.
  virtual void register_memory(std::span<std::byte> memory) = 0;
  virtual void unregister_memory(std::span<std::byte> memory) = 0;
  /// `access`: "O_DIRECT" or "buffered".
  virtual std::string description(const std::string& access) const = 0;
};

/// Null where the kernel refuses; `refusal` then says why.
std::unique_ptr<Backend> make_uring_backend(PieceQueue& queue, std::string& refusal);

/// `why`: the reason for not using io_uring, "" if it was chosen.
std::unique_ptr<Backend> make_thread_backend(PieceQueue& queue, int threads, std::string why);

}  // namespace overspill::io
