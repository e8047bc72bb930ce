#include "inference/run/team.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace overspill::inference {
namespace {

TEST(Team, EveryThreadSeesWhatTheOthersWroteBeforeABarrier) {
  for (const int size : {1, 2, 3, 5}) {
    Team team(size);
    std::vector<int> values(static_cast<size_t>(size));
    std::vector<int> wrong(static_cast<size_t>(size));
    for (int run = 0; run < 20; ++run) {
      team.run([&](int thread) {
        for (int turn = 0; turn < 50; ++turn) {
          values[static_cast<size_t>(thread)] = run * 1000 + turn;
          team.barrier();
          for (const int value : values) wrong[static_cast<size_t>(thread)] += value != run * 1000 + turn;
          team.barrier();
        }
      });
    }
    for (const int count : wrong) EXPECT_EQ(count, 0);
  }
}

TEST(Team, ThrowsWhatAThreadThrewAndGoesOn) {
  Team team(3);
  for (const int thrower : {0, 1, 2}) {
    const auto work = [&](int thread) {
      if (thread == thrower) throw std::runtime_error("thrown");
    };
    EXPECT_THROW(team.run(work), std::runtime_error);
  }
  std::vector<int> ran(3);
  team.run([&](int thread) { ran[static_cast<size_t>(thread)] = 1; });
  EXPECT_EQ(ran, (std::vector<int>{1, 1, 1}));
}

}  // namespace
}  // namespace overspill::inference
