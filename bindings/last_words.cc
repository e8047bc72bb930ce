#include "bindings/last_words.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>

namespace overspill::bindings {
namespace {

// What the signal handler uses, written before it is installed.
int wake_fd = -1;  // read by the thread that ends the process
pid_t owner = 0;   // the process that has that thread

void wake(int) {
  // A forked child inherits the handler and the pipe. What it writes there would end its parent.
  if (getpid() != owner) {
    std::signal(SIGTERM, SIG_DFL);
    std::raise(SIGTERM);  // ends the child as this handler returns
    return;
  }
  const int before = errno;
  static_cast<void>(!write(wake_fd, "", 1));
  errno = before;
}

}  // namespace

bool linger_when_terminated(double seconds) {
  struct sigaction now {};
  sigaction(SIGTERM, nullptr, &now);
  const bool inherited = now.sa_handler == wake && owner != getpid();
  if (now.sa_handler == wake && !inherited) return true;
  if (now.sa_handler != SIG_DFL && !inherited) return false;
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return false;
  std::signal(SIGTERM, SIG_DFL);  // an inherited handler sees none of this half written
  wake_fd = ends[1];
  owner = getpid();
  std::thread([reader = ends[0], seconds] {
    char byte = 0;
    while (read(reader, &byte, 1) < 0 && errno == EINTR) {
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    std::signal(SIGTERM, SIG_DFL);
    kill(getpid(), SIGTERM);
  }).detach();
  struct sigaction action {};
  action.sa_handler = wake;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGTERM, &action, nullptr);
  return true;
}

}  // namespace overspill::bindings
