// What a plan takes to be held at once.
#include "engine/plan/plan_sizes.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/memory/budget.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"

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

// ---- the arena

/// Eight units of 512 KiB.
Plan plan_of(int64_t budget) {
  std::vector<UnitSpec> units(8);
  for (size_t u = 0; u < units.size(); ++u) {
    units[u].name = "unit" + std::to_string(u);
    units[u].segments.resize(1);
    units[u].segments[0].name = "w" + std::to_string(u);
    units[u].segments[0].shape = {512, 512};
  }
  Config config;
  config.host_budget_bytes = budget;
  config.nvme = {"/nowhere"};
  config.chunk_elements = 4096;
  return make_plan(make_layout(units, config.chunk_elements, 0, 1), config, {.shares_host_memory = true});
}

TEST(GatherArena, HasRoomForFurtherUnitsBeforeWeightsComeHome) {
  constexpr int64_t kUnit = (512 << 10) + 4096;
  int64_t least = 0;
  for (int64_t budget = 1 << 20; least == 0; budget += 16 << 10) {
    try {
      EXPECT_EQ(plan_of(budget).gather_host_bytes, 3 * kUnit) << "the least budget has the least arena";
      least = budget;
    } catch (const BudgetError&) {
    }
  }
  EXPECT_EQ(plan_of(least + kUnit).gather_host_bytes, 4 * kUnit);
  EXPECT_GE(plan_of(least + 2 * kUnit + (64 << 10)).gather_host_bytes, 5 * kUnit);
}

}  // namespace
}  // namespace overspill::engine
