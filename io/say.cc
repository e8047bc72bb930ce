#include "io/say.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace overspill::io {
namespace {

constexpr std::chrono::seconds kPatience{1};

// Lines that stderr has not taken for so long. The process has one stderr, so this is the process's too.
std::atomic<int> hanging = 0;

// `line` ends with a line break. In one call, so that lines of several threads do not mix. Not through stdio:
// the end of the process would wait for a lock that a write which stands still holds.
void write_line(std::string_view line) noexcept {
  while (!line.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    line.remove_prefix(static_cast<size_t>(written));
  }
}

class Line {
 public:
  explicit Line(std::string text) : text_(std::move(text)) {}

  void write() noexcept {
    // A pipe that is closed must not end the process where nobody ignores the signal.
    sigset_t closed_pipe;
    ::sigemptyset(&closed_pipe);
    ::sigaddset(&closed_pipe, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &closed_pipe, nullptr);
    write_line(text_);
    const MutexLock lock(mutex_);
    written_ = true;
    if (given_up_) --hanging;
    changed_.notify_all();
  }
  void wait() {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    const MutexLock lock(mutex_);
    while (!written_ && changed_.wait_until(mutex_, end)) {
    }
    if (written_) return;
    given_up_ = true;
    ++hanging;
  }

 private:
  const std::string text_;
  Mutex mutex_;
  Condition changed_;
  bool written_ GUARDED_BY(mutex_) = false;
  bool given_up_ GUARDED_BY(mutex_) = false;
};

}  // namespace

// By a thread of its own: stderr may be a pipe whose reader stands still, or a file on the very disk that
// hangs.
void say_on_stderr(std::string_view line) noexcept {
  if (hanging > 0) return;
  try {
    const auto shared = std::make_shared<Line>(std::string(line) + "\n");
    std::thread([shared] { shared->write(); }).detach();
    shared->wait();
  } catch (const std::exception&) {  // no memory, or no thread
    write_line(line);
    write_line("\n");
  }
}

}  // namespace overspill::io
