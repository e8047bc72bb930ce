// What a round comes to, from what the ranks announce.
#include "engine/ranks/agreement.h"

#include <gtest/gtest.h>

namespace overspill::engine {
namespace {

constexpr int32_t kUnits = 130;  // more than two words of bits

Agreement of(const Announcements& said) {
  Agreement out;
  agree(said, out);
  return out;
}

Announcements world(int ranks, const Standing& standing = {}) {
  Announcements said(ranks, kUnits);
  for (int rank = 0; rank < ranks; ++rank) said.start(rank, standing);
  return said;
}

void all_say(Announcements& said, Say say, int32_t unit) {
  for (int rank = 0; rank < said.ranks(); ++rank) said.say(rank, say, unit);
}

TEST(Agreement, KeepsBitsOfRanksSaysAndUnitsApart) {
  Announcements said = world(3);
  said.say(1, Say::wants, 64);
  said.say(2, Say::gives, 129);
  for (int rank = 0; rank < 3; ++rank) {
    for (int32_t unit = 0; unit < kUnits; ++unit) {
      EXPECT_EQ(said.says(rank, Say::wants, unit), rank == 1 && unit == 64);
      EXPECT_EQ(said.says(rank, Say::gives, unit), rank == 2 && unit == 129);
      EXPECT_FALSE(said.says(rank, Say::serves, unit));
    }
  }
}

TEST(Agreement, NothingToDoIsIdle) {
  EXPECT_TRUE(of(world(3)).idle);
}

TEST(Agreement, GathersWhatOneWantsAndAllServeAndWaitsForTheRest) {
  Announcements said = world(3);
  said.say(1, Say::wants, 7);
  said.say(0, Say::serves, 7);
  said.say(1, Say::serves, 7);
  EXPECT_TRUE(of(said).gathers.empty());
  EXPECT_EQ(of(said).due, 7);
  said.say(2, Say::serves, 7);
  EXPECT_EQ(of(said).gathers, std::vector<int32_t>{7});
  EXPECT_EQ(of(said).due, -1);
}

TEST(Agreement, GathersNothingWhileOneRankHasChangedMoreOften) {
  Announcements said = world(2);
  said.start(1, {.changes = 1});
  all_say(said, Say::wants, 3);
  all_say(said, Say::serves, 3);
  EXPECT_TRUE(of(said).gathers.empty());
}

TEST(Agreement, WhatACallerWaitsForGoesFirst) {
  Announcements said = world(2);
  said.start(1, {.demanded = 100});
  for (const int32_t unit : {3, 50, 100}) {
    all_say(said, Say::wants, unit);
    all_say(said, Say::serves, unit);
  }
  EXPECT_EQ(of(said).gathers, (std::vector<int32_t>{100, 3, 50}));
}

TEST(Agreement, SumsWhatSomebodyGivesAndAllHaveGiven) {
  Announcements said = world(2);
  said.say(0, Say::gives, 5);
  said.say(0, Say::complete, 5);
  EXPECT_TRUE(of(said).sums.empty());
  said.say(1, Say::complete, 5);
  EXPECT_EQ(of(said).sums, std::vector<int32_t>{5});
}

TEST(Agreement, MeetsWhenAllAreThere) {
  const Standing at_step{.meeting = static_cast<uint64_t>(Meeting::step), .number = 4};
  Announcements said = world(2, at_step);
  EXPECT_TRUE(of(said).meet);
  said.start(1, {});
  EXPECT_FALSE(of(said).meet);
  EXPECT_EQ(of(said).failure, "");
  Standing other = at_step;
  other.number = 5;
  said.start(1, other);
  EXPECT_NE(of(said).failure.find("rank 1 is at step() number 5, rank 0 is at step() number 4"),
            std::string::npos);
}

TEST(Agreement, WhoWaitsForRoomGetsItFromWhatAllHaveGivenElseIsTold) {
  const Standing stuck{.stuck = 1};
  Announcements said = world(2, stuck);
  said.say(0, Say::gives, 9);
  EXPECT_TRUE(of(said).out_of_room);
  said.say(1, Say::gives, 9);
  EXPECT_FALSE(of(said).out_of_room);
  EXPECT_EQ(of(said).sums, std::vector<int32_t>{9});
  said.start(1, {});  // rank 1 goes on: it may yet come to step()
  EXPECT_FALSE(of(said).out_of_room);
  EXPECT_TRUE(of(said).sums.empty());
}

TEST(Agreement, EndsTheWorldWhereAllWaitForAChangeThatARankHasNotMade) {
  const Standing waits{.changes = 5, .demanded = 7};
  Announcements said = world(3, waits);
  all_say(said, Say::wants, 7);
  EXPECT_EQ(of(said).failure, "");
  said.start(1, {.changes = 4});  // it works, and may yet make the change
  EXPECT_EQ(of(said).failure, "");
  said.start(1, {.changes = 4, .meeting = static_cast<uint64_t>(Meeting::step), .number = 1});
  EXPECT_NE(
      of(said).failure.find("rank 1 waits in a collective call after 4 changes of weights, rank 0 waits for "
                            "unit 7 after 5"),
      std::string::npos);
  said.start(1, {.changes = 4, .demanded = 7});
  said.say(1, Say::wants, 7);
  EXPECT_NE(of(said).failure.find("rank 1 waits after 4 changes of weights"), std::string::npos);
  said.start(1, {.changes = 4, .leaving = 1});
  EXPECT_NE(of(said).failure.find("rank 1 has left the world after 4 changes of weights, rank 0 waits for "
                                  "unit 7 after 5"),
            std::string::npos);
  said.start(2, {.changes = 4, .demanded = 7});  // it has what it waited for, and goes on
  EXPECT_EQ(of(said).failure, "");
}

TEST(Agreement, RefusesOtherModels) {
  Announcements said = world(2);
  said.start(1, {.model = 8});
  EXPECT_NE(of(said).failure.find("rank 1 has another model"), std::string::npos);
}

}  // namespace
}  // namespace overspill::engine
