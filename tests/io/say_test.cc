// A stderr that takes nothing loses what was to be said, and nothing else: no warning ends the process.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>

#include "io/files.h"
#include "io/memory_store.h"
#include "io/stall_watch.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

using std::chrono::nanoseconds;
using std::chrono::seconds;

/// From here on a write to stderr fails with EPIPE, as in a Python program whose stderr nobody reads any
/// more.
bool break_stderr() {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return false;
  ::close(ends[0]);
  ::signal(SIGPIPE, SIG_IGN);
  return ::dup2(ends[1], STDERR_FILENO) == STDERR_FILENO && ::write(STDERR_FILENO, "", 1) < 0 &&
         errno == EPIPE;
}

TEST(StderrThatNobodyReads, LetsTheStoreReadAgainWhatTheDiskRefusedOnce) {
  const ScratchFolder folder;
  for (const auto backend : {FileStoreOptions::Backend::automatic, FileStoreOptions::Backend::threads}) {
    EXPECT_EQ(exit_status_of([&] {
                if (!break_stderr()) return 1;
                std::atomic<bool> refused = false;
                FileStoreOptions options = file_options(folder.path());
                options.backend = backend;
                options.result_hook = [&](bool writes, int64_t, int64_t, int64_t result) {
                  return writes || refused.exchange(true) ? result : -EIO;
                };
                const auto store = make_file_store(options);
                store->reserve(4 * kMiB);
                const Extent extent = written(*store, kMiB, 7);
                AlignedMemory memory(kMiB), expected(kMiB);
                expected.fill(7);
                if (read(*store, extent, memory)) return 2;
                if (!refused || store->stats().paths[0].retries.reads != 1) return 3;
                return memory == expected ? 0 : 4;
              }),
              0);
  }
}

TEST(StderrThatNobodyReads, LetsTheWatchTellAStallAndItsEnd) {
  EXPECT_EQ(exit_status_of([] {
              if (!break_stderr()) return 1;
              nanoseconds now = seconds(1000);
              std::optional<nanoseconds> since = now;
              StallWatch watch({.tell_after = seconds(10), .give_up_after = {}}, nullptr,
                               [&] { return now; });
              watch.add({.path = "/mnt/a",
                         .silent_since = [&] { return since; },
                         .unanswered = [] { return std::optional(Unanswered{.file = "/mnt/a/slab"}); },
                         .give_up = [](const Error&) {},
                         .tend = nullptr});
              now += seconds(11);
              watch.look();
              if (watch.stats(0).count != 1) return 2;
              since.reset();
              watch.look();
              return watch.board()->text().empty() ? 0 : 3;
            }),
            0);
}

/// From here on a write to stderr waits for ever, as in a pipe whose reader sleeps.
bool stop_stderr() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_NONBLOCK) != 0) return false;
  const std::array<char, 4096> page{};
  while (::write(ends[1], page.data(), page.size()) > 0) {
  }
  while (::write(ends[1], page.data(), 1) > 0) {
  }
  return errno == EAGAIN && ::fcntl(ends[1], F_SETFL, 0) == 0 &&
         ::dup2(ends[1], STDERR_FILENO) == STDERR_FILENO;
}

/// Each would hang without an end.
TEST(StderrThatStandsStill, HoldsUpNeitherAWarningNorTheDeadlineOfADisk) {
  EXPECT_EQ(exit_status_of([] {
              if (!stop_stderr()) return 1;
              warn_once("nobody reads this");
              nanoseconds now = seconds(1000);
              const nanoseconds since = now;
              bool given_up = false;
              StallWatch watch({.tell_after = seconds(10), .give_up_after = seconds(30)}, nullptr,
                               [&] { return now; });
              watch.add({.path = "/mnt/a",
                         .silent_since = [&] { return std::optional(since); },
                         .unanswered = [] { return std::optional(Unanswered{.file = "/mnt/a/slab"}); },
                         .give_up = [&](const Error&) { given_up = true; },
                         .tend = nullptr});
              for (int look = 0; look < 4; ++look) {
                now += seconds(11);
                watch.look();
                if (watch.board()->text().empty()) return 2;
              }
              return given_up ? 0 : 3;
            }),
            0);
}

/// The process goes on where a host program leaves the signal of a closed pipe as it is.
TEST(StderrThatNobodyReads, IsNoSignalThatEndsTheProcess) {
  EXPECT_EQ(exit_status_of([] {
              if (!break_stderr()) return 1;
              ::signal(SIGPIPE, SIG_DFL);
              warn_once("nobody reads this");
              return 0;
            }),
            0);
}

TEST(StderrThatNobodyReads, TakesWarningsAndTheSeedOfASimulation) {
  EXPECT_EQ(exit_status_of([] {
              if (!break_stderr()) return 1;
              warn_once("nobody reads this");
              Faults faults{.seed = 3};
              faults.delay_max = std::chrono::microseconds(1);
              return make_memory_store(kMiB, faults, kPiece) != nullptr ? 0 : 2;
            }),
            0);
}

}  // namespace
}  // namespace overspill::io
