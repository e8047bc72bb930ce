#include "inference/run/turns.h"

#include <gtest/gtest.h>

#include <mutex>
#include <thread>
#include <vector>

namespace overspill::inference {
namespace {

TEST(Turns, AreTakenInTheOrderInWhichTheyWereAskedFor) {
  Turns turns;
  std::vector<int> order;  // guarded by turns
  std::vector<std::thread> threads;
  turns.lock();
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const std::lock_guard turn(turns);
      order.push_back(i);
    });
    while (turns.open() < i + 2) std::this_thread::yield();
  }
  turns.unlock();
  {  // asked for by the one that had it last, behind the others
    const std::lock_guard turn(turns);
    order.push_back(4);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace overspill::inference
