// Executors: order, nothing lost, exceptions, as many workers as promised, the floating-point mode inside a
// task.
#include "cpu_optim/executor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu_optim/floating_point.h"

namespace overspill::optim {
namespace {

using Make = std::unique_ptr<Executor> (*)(int threads);

struct Form {
  const char* name;
  Make make;
};

class ExecutorTest : public testing::TestWithParam<Form> {
 protected:
  static std::unique_ptr<Executor> make(int threads) { return GetParam().make(threads); }
};

INSTANTIATE_TEST_SUITE_P(Forms, ExecutorTest,
                         testing::Values(
#if !defined(OVERSPILL_PLAIN_THREADS)  // ThreadSanitizer cannot see into oneTBB's library
                             Form{"tbb", make_tbb_executor},
#endif
                             Form{"threads", make_thread_executor}, Form{"chosen", make_executor}),
                         [](const auto& info) { return info.param.name; });

TEST_P(ExecutorTest, OneThreadRunsInTheOrderSubmitted) {
  std::vector<int> order;
  {
    const auto executor = make(1);
    EXPECT_EQ(executor->threads(), 1);
    for (int i = 0; i < 1000; ++i) executor->submit([&order, i] { order.push_back(i); });
  }
  std::vector<int> want(1000);
  std::iota(want.begin(), want.end(), 0);
  EXPECT_EQ(order, want);
}

// With several workers each sees a rising sequence.
TEST_P(ExecutorTest, EveryWorkerSeesTheOrderSubmitted) {
  std::mutex mutex;
  std::vector<std::pair<std::thread::id, int>> seen;
  {
    const auto executor = make(3);
    for (int i = 0; i < 3000; ++i) {
      executor->submit([&, i] {
        const std::lock_guard lock(mutex);
        seen.emplace_back(std::this_thread::get_id(), i);
      });
    }
  }
  ASSERT_EQ(seen.size(), 3000u);
  for (const auto& [worker, unused] : seen) {
    int last = -1;
    for (const auto& [other, i] : seen) {
      if (other != worker) continue;
      ASSERT_GT(i, last);
      last = i;
    }
    if (&worker - &seen[0].first > 64) break;  // a few starts are enough to meet every worker
  }
}

TEST_P(ExecutorTest, NothingIsLostAndTheDestructorWaits) {
  std::atomic<int> ran{0};
  for (int round = 0; round < 20; ++round) {
    const auto executor = make(2);
    std::vector<std::thread> submitters;
    for (int thread = 0; thread < 4; ++thread) {
      submitters.emplace_back([&] {
        for (int i = 0; i < 250; ++i) executor->submit([&] { ++ran; });
      });
    }
    for (std::thread& submitter : submitters) submitter.join();
  }
  EXPECT_EQ(ran, 20 * 1000);
}

TEST_P(ExecutorTest, ATaskMaySubmit) {
  std::atomic<int> ran{0};
  {
    const auto executor = make(1);
    executor->submit([&] {
      for (int i = 0; i < 10; ++i) executor->submit([&] { ++ran; });
    });
    executor->parallel_for(1, [](int64_t) {});  // the queue is in order, so the first task has run
  }
  EXPECT_EQ(ran, 10);
}

TEST_P(ExecutorTest, ParallelForCallsEveryIndexOnce) {
  const auto executor = make(2);
  for (const int count : {0, 1, 2, 3, 1000}) {
    std::vector<std::atomic<int>> calls(static_cast<size_t>(count));
    executor->parallel_for(count, [&](int64_t i) { ++calls[static_cast<size_t>(i)]; });
    for (const auto& call : calls) ASSERT_EQ(call, 1);
  }
}

TEST_P(ExecutorTest, ParallelForRethrowsAndTheExecutorGoesOn) {
  const auto executor = make(2);
  for (int round = 0; round < 50; ++round) {
    EXPECT_THROW(executor->parallel_for(100,
                                        [](int64_t i) {
                                          if (i == 7) throw std::runtime_error("seven");
                                        }),
                 std::runtime_error);
  }
  std::atomic<int> ran{0};
  executor->parallel_for(10, [&](int64_t) { ++ran; });
  EXPECT_EQ(ran, 10);
}

TEST_P(ExecutorTest, ParallelForInsideAWorkerIsAnErrorNotAHang) {
  const auto executor = make(1);
  EXPECT_THROW(executor->parallel_for(1, [&](int64_t) { executor->parallel_for(1, [](int64_t) {}); }),
               std::logic_error);
}

// True if `count` tasks, spread over the executors, were all running at one time.
bool meet(const std::vector<Executor*>& executors, int count) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::atomic<int> here{0}, met{0}, left{count};
  for (int i = 0; i < count; ++i) {
    executors[static_cast<size_t>(i) % executors.size()]->submit([&] {
      ++here;
      while (here < count && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
      if (here >= count) ++met;
      --left;
    });
  }
  while (left > 0) std::this_thread::yield();
  return met == count;
}

TEST_P(ExecutorTest, ThereAreAsManyWorkersAsPromised) {
  const auto first = make(3);
  EXPECT_EQ(first->threads(), 3);
  EXPECT_TRUE(meet({first.get()}, 3));
  const auto second = make(3);
  EXPECT_TRUE(meet({first.get(), second.get()}, 6));
}

TEST_P(ExecutorTest, NoThreadsIsAnError) {
  EXPECT_THROW(make(0), std::invalid_argument);
  EXPECT_THROW(make(-1), std::invalid_argument);
}

TEST_P(ExecutorTest, AnIdleExecutorDoesNotSpin) {
  const auto executor = make(2);
  executor->parallel_for(2, [](int64_t) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // oneTBB looks for work a little longer
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC, 0.1);
}

#if defined(__x86_64__)
TEST_P(ExecutorTest, TasksRunInTheDefaultFloatingPointMode) {
  constexpr unsigned kModes = 0xFFC0;  // all but the sticky flags
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0xFFC0);  // flush, denormals are zero, round towards zero: workers inherit it
  std::atomic<int> other_mode{0};
  {
    const auto executor = make(2);
    for (int i = 0; i < 100; ++i) {
      executor->submit([&] {
        if ((_mm_getcsr() & kModes) != 0x1F80) ++other_mode;
        _mm_setcsr(0xFFC0);  // a task that changes it does not change it for the next
      });
    }
    executor->parallel_for(100, [&](int64_t) {
      if ((_mm_getcsr() & kModes) != 0x1F80) ++other_mode;
    });
  }
  _mm_setcsr(before);
  EXPECT_EQ(other_mode, 0);
}
#endif

#if !defined(OVERSPILL_PLAIN_THREADS)
TEST(MakeExecutor, AnUnknownNameIsAnError) {
  setenv("OVERSPILL_EXECUTOR", "fibres", 1);
  EXPECT_THROW(make_executor(1), std::invalid_argument);
  setenv("OVERSPILL_EXECUTOR", "threads", 1);
  EXPECT_EQ(make_executor(2)->threads(), 2);
  unsetenv("OVERSPILL_EXECUTOR");
}
#endif

/// Once the process ended, since threads that had begun were not joined.
TEST(ThreadExecutor, ThatGetsTooFewThreadsSaysSo) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may become a user who has no other process";
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit few{3, 3};
    if (::setrlimit(RLIMIT_NPROC, &few) != 0 || ::setuid(54'322) != 0) ::_exit(1);
    try {
      make_thread_executor(8);
    } catch (const std::system_error& error) {
      ::_exit(std::string(error.what()).find("engine.threads = 8") != std::string::npos ? 0 : 2);
    }
    ::_exit(3);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace overspill::optim
