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

int wake_fd = -1;  // what a signal handler may use: a descriptor, written before the handler is installed

void wake(int) {
  const int before = errno;
  static_cast<void>(!write(wake_fd, "", 1));
  errno = before;
}

}  // namespace

bool linger_when_terminated(double seconds) {
  struct sigaction now {};
  sigaction(SIGTERM, nullptr, &now);
  if (now.sa_handler == wake) return true;
  if (now.sa_handler != SIG_DFL) return false;
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return false;
  wake_fd = ends[1];
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
