#include <unistd.h>

#include <cerrno>
#include <thread>
#include <utility>
#include <vector>

#include "io/backend.h"

namespace overspill::io {
namespace {

class ThreadBackend final : public Backend {
 public:
  ThreadBackend(PieceQueue& queue, int threads, std::string why) : why_(std::move(why)) {
    queue.threads_begin(threads);
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([&queue] {
        work(queue);
        queue.thread_ends();
      });
    }
  }
  ~ThreadBackend() override {
    for (std::thread& thread : threads_) thread.join();
  }

  void wake() override {}  // push() has notified
  void register_memory(std::span<std::byte>) override {}
  void unregister_memory(std::span<std::byte>) override {}

  std::string description(const std::string& access) const override {
    return "threads, " + access + (why_.empty() ? "" : ": " + why_);
  }

 private:
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
