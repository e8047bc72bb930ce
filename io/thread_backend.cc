#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "io/backend.h"
#include "io/files.h"

namespace overspill::io {
namespace {

class ThreadBackend final : public Backend {
 public:
  ThreadBackend(PieceQueue& queue, int threads, std::string why) : why_(std::move(why)) {
    threads_.reserve(static_cast<size_t>(threads));
    try {
      while (std::ssize(threads_) < threads) begin_thread(queue);
    } catch (const std::system_error& error) {
      queue.stop();
      join();
      throw no_threads(error,
                       fmt::format("the store needs {} threads and was given {}", threads, threads_.size()));
    }
  }
  ~ThreadBackend() override { join(); }

  void wake() override {}  // push() has notified
  void register_memory(std::span<std::byte>) override {}
  void unregister_memory(std::span<std::byte>) override {}

  std::string description(const std::string& access) const override {
    return "threads, " + access + (why_.empty() ? "" : ": " + why_);
  }

 private:
  void begin_thread(PieceQueue& queue) {
    queue.threads_begin(1);
    try {
      threads_.emplace_back([&queue] {
        work(queue);
        queue.thread_ends();
      });
    } catch (const std::system_error&) {
      queue.thread_ends();
      throw;
    }
  }
  void join() {
    for (std::thread& thread : threads_) thread.join();
  }

  static void work(PieceQueue& queue) {
    Piece piece;
    while (queue.wait()) {
      while (queue.next(piece)) {
        while (!queue.settle(piece, transfer(queue, piece))) {
        }
      }
    }
  }

  static int64_t transfer(PieceQueue& queue, Piece& piece) {
    const auto bytes = static_cast<size_t>(piece.left());
    queue.asked(piece);
    const ssize_t result = piece.writes() ? ::pwrite(piece.fd(), piece.memory(), bytes, piece.file_offset())
                                          : ::pread(piece.fd(), piece.memory(), bytes, piece.file_offset());
    const int64_t outcome = result < 0 ? -errno : result;
    queue.answered(piece);
    return outcome;
  }

  const std::string why_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_thread_backend(PieceQueue& queue, int threads, std::string why) {
  return std::make_unique<ThreadBackend>(queue, threads, std::move(why));
}

}  // namespace overspill::io
