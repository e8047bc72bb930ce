#include "engine/checkpoint/side_by_side.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace overspill::engine {
namespace {

const auto kSilent = [](int64_t) {};

TEST(SideBySide, DoesEachItemOnceAndReportsAllBytesToItsCaller) {
  constexpr int64_t kItems = 1'000;
  constexpr int kWorkers = 4;
  std::vector<std::atomic<int>> times(kItems);
  std::atomic<int> strangers = 0;
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<int64_t> reports;
  side_by_side(
      kItems, kWorkers,
      [&](int worker, int64_t item) {
        if (worker < 0 || worker >= kWorkers || std::this_thread::get_id() == caller) ++strangers;
        ++times[static_cast<size_t>(item)];
        return item % 3;
      },
      [&](int64_t done) {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        reports.push_back(done);
      });
  for (const auto& count : times) EXPECT_EQ(count, 1);
  EXPECT_EQ(strangers, 0);
  ASSERT_FALSE(reports.empty());
  EXPECT_TRUE(std::ranges::is_sorted(reports, std::less_equal()));
  EXPECT_EQ(reports.back(), 999);  // 333 times 0 + 1 + 2, and 0
}

TEST(SideBySide, WorkersAreAtWorkAtTheSameTime) {
  std::barrier together(3);
  std::atomic<int> met = 0;
  side_by_side(
      3, 8,
      [&](int, int64_t) {
        together.arrive_and_wait();  // for ever, where one waits for another's end
        ++met;
        return int64_t{1};
      },
      kSilent);
  EXPECT_EQ(met, 3);
}

TEST(SideBySide, HasNothingToDoForNothing) {
  side_by_side(
      0, 4, [](int, int64_t) -> int64_t { throw std::logic_error("there is no item"); },
      [](int64_t) { FAIL() << "there is nothing to report"; });
}

TEST(SideBySide, OfSeveralErrorsTheLowestItemsIsThrown) {
  std::barrier together(3);  // all three have begun before one has failed
  std::atomic<int64_t> last = 0;
  try {
    side_by_side(
        1'000, 3,
        [&](int, int64_t item) -> int64_t {
          last = std::max<int64_t>(last, item);
          together.arrive_and_wait();
          throw std::runtime_error(std::to_string(item));
        },
        kSilent);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "0");
  }
  EXPECT_EQ(last, 2);  // none began after that
}

TEST(SideBySide, WhatTheReportThrowsEndsTheWorkBeforeItIsThrown) {
  std::atomic<int> at_work = 0;
  std::atomic<int64_t> begun = 0;
  std::atomic<bool> reported = false;
  constexpr int64_t kEndless = int64_t{1} << 60;  // who did them all would not be back
  EXPECT_THROW(side_by_side(
                   kEndless, 2,
                   [&](int, int64_t item) {
                     ++at_work;
                     ++begun;
                     while (item > 0 && !reported) std::this_thread::yield();
                     --at_work;
                     return int64_t{1};
                   },
                   [&](int64_t) {
                     reported = true;
                     throw std::runtime_error("interrupted");
                   }),
               std::runtime_error);
  EXPECT_EQ(at_work, 0);
  EXPECT_GT(begun, 0);
}

}  // namespace
}  // namespace overspill::engine
