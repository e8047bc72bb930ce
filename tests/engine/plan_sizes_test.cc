// What a plan takes to be held at once.
#include "engine/plan/plan_sizes.h"

#include <gtest/gtest.h>

namespace overspill::engine {
namespace {

TEST(HeldAtOnce, IsTheThreeLargestUnitsAndThoseReadAhead) {
  const std::vector<GatheredSize> sizes = {{1}, {5}, {2}, {4}, {3}};
  EXPECT_EQ(held_at_once(sizes, 0), 5 + 4 + 3);
  EXPECT_EQ(held_at_once(sizes, 1), 5 + 4 + 3 + 2);
  EXPECT_EQ(held_at_once(sizes, 9), 15);
  EXPECT_EQ(held_at_once({}, 2), 0);
}

TEST(HeldAtOnce, IsWhatACompiledBlockNeedsBesideTheTwoLargestOthers) {
  // Two blocks, 0 and 1, of four units each, and three others.
  const std::vector<GatheredSize> sizes = {{10},   {3, 0}, {3, 0}, {3, 0}, {1, 0}, {4, 1},
                                           {4, 1}, {4, 1}, {1, 1}, {6},    {2}};
  EXPECT_EQ(held_at_once(sizes, 0), 4 + 4 + 4 + 1 + 10 + 6);
  EXPECT_EQ(held_at_once(sizes, 2), 4 + 4 + 4 + 1 + 10 + 6 + 3 + 3);
}

TEST(HeldAtOnce, CountsWhatAllBlocksShareWithEach) {
  const std::vector<GatheredSize> sizes = {{.bytes = 5, .together = kWithEachBlock},
                                           {.bytes = 3, .together = 0},
                                           {.bytes = 3, .together = 0},
                                           {.bytes = 2, .together = 1},
                                           {.bytes = 1}};
  EXPECT_EQ(held_at_once(sizes, 0), 3 + 3 + 5 + 2 + 1);
}

TEST(HeldAtOnce, IsNotLessWhereOthersAreLarger) {
  EXPECT_EQ(held_at_once({{100}, {90}, {80}, {1, 0}, {1, 0}}, 0), 270);
}

}  // namespace
}  // namespace overspill::engine
