#include "io/own_process.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace overspill::io {
namespace {

std::atomic<int> counted{0};

}  // namespace

int OwnProcess::forks() {
  return counted.load(std::memory_order_relaxed);
}

OwnProcess::OwnProcess() : pid_(::getpid()) {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++counted; });
  static_cast<void>(registered);
  forks_ = forks();
}

}  // namespace overspill::io
