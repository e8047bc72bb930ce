#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "engine/collectives/in_process.h"
#include "engine/collectives/self_communicator.h"
#include "tests/engine/collectives_conformance.h"

namespace overspill::engine {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{20'000};

/// Runs body(communicator) on one thread a rank; returns what each rank threw ("" for nothing).
std::vector<std::string> run_world(int ranks, milliseconds timeout,
                                   const std::function<void(Communicator&)>& body) {
  auto world = make_in_process_world(ranks, timeout);
  std::vector<std::string> errors(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*world[rank]);
      } catch (const CommunicatorError& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

void expect_all_say(const std::vector<std::string>& errors, std::initializer_list<const char*> parts) {
  for (const std::string& error : errors) {
    for (const char* part : parts)
      EXPECT_NE(error.find(part), std::string::npos) << "'" << part << "' in: " << error;
  }
}

class Worlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Collectives, Worlds, ::testing::Values(1, 2, 3, 4));

TEST_P(Worlds, MoveEverySlice) {
  const auto errors =
      run_world(GetParam(), kLong, [](Communicator& ranks) { conformance::move_every_slice(ranks); });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST_P(Worlds, ExchangeWhatEachPairWants) {
  const auto errors = run_world(
      GetParam(), kLong, [](Communicator& ranks) { conformance::exchange_what_each_pair_wants(ranks); });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST_P(Worlds, ExchangeSeveralTogether) {
  const auto errors =
      run_world(GetParam(), kLong, [](Communicator& ranks) { conformance::exchange_together(ranks); });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST_P(Worlds, RefuseAnOddPair) {
  if (GetParam() < 2) GTEST_SKIP() << "a pair needs two ranks";
  expect_all_say(run_world(GetParam(), kLong, conformance::an_odd_pair),
                 {"rank 0 sends 8 bytes to rank 1, which has room for 16"});
}

TEST_P(Worlds, SumInRankOrderToTheBit) {
  const auto errors = run_world(GetParam(), kLong, conformance::sum_in_rank_order_to_the_bit);
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST_P(Worlds, ReduceAndScatter) {
  if (GetParam() < 2) GTEST_SKIP() << "who is alone has nothing to add";
  const auto errors =
      run_world(GetParam(), kLong, [](Communicator& ranks) { conformance::reduce_and_scatter(ranks); });
  for (const auto& error : errors) EXPECT_EQ(error, "");
  expect_all_say(run_world(GetParam(), kLong, conformance::a_sum_of_another_size),
                 {"reduce_scatter_sum", "rank 0"});
}

TEST_P(Worlds, BarrierHoldsEverybody) {
  std::atomic<int> arrived = 0;
  const auto errors = run_world(GetParam(), kLong, [&](Communicator& ranks) {
    for (int round = 1; round <= 50; ++round) {
      ++arrived;
      ranks.barrier();
      EXPECT_GE(arrived, round * ranks.world());
      ranks.barrier();
    }
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

TEST_P(Worlds, RefuseSizesThatDiffer) {
  const int world = GetParam();
  expect_all_say(run_world(world, kLong, conformance::sizes_that_differ), {"all_to_all", "rank"});
  if (world == 1) return;
  expect_all_say(run_world(world, kLong, conformance::a_size_that_is_not_a_multiple),
                 {"all_gather", "not a multiple"});
}

TEST(InProcess, NamesTheRankThatMakesAnotherCall) {
  expect_all_say(run_world(3, kLong, conformance::another_call), {"rank 1", "all_to_all", "all_gather"});
}

TEST(InProcess, NamesTheRanksThatAreLate) {
  std::atomic<int> gave_up = 0;
  const auto errors = run_world(4, milliseconds(500), [&](Communicator& ranks) {
    const bool late = ranks.rank() % 2 == 1;
    while (late && gave_up < 2) std::this_thread::sleep_for(milliseconds(1));
    try {
      ranks.barrier();
    } catch (...) {
      ++gave_up;
      throw;
    }
  });
  expect_all_say(errors, {"barrier", "rank 1, 3 did not join within 500 ms"});
}

TEST(InProcess, AbortEndsCallsInProgressAndLaterOnes) {
  const auto errors = run_world(3, kLong, [](Communicator& ranks) {
    if (ranks.rank() == 2) ranks.abort("the disk is full");
    std::vector<double> values(3);
    EXPECT_THROW(ranks.all_reduce_sum(values), CommunicatorError);
    EXPECT_EQ(ranks.failure(), "rank 2 aborted: the disk is full");
    ranks.barrier();
  });
  expect_all_say(errors, {"barrier", "rank 2 aborted", "the disk is full"});
}

TEST(InProcess, ARankThatIsGoneEndsTheWorld) {
  for (const bool others_wait_already : {true, false}) {
    auto world = make_in_process_world(3, kLong);
    std::vector<std::thread> threads;
    if (!others_wait_already) world[0].reset();
    for (int rank : {1, 2}) {
      threads.emplace_back([&, rank] {
        try {
          world[rank]->barrier();
          ADD_FAILURE() << "a barrier without rank 0";
        } catch (const CommunicatorError& error) {
          EXPECT_NE(std::string(error.what()).find("barrier: rank 0 has left"), std::string::npos)
              << error.what();
        }
      });
    }
    if (others_wait_already) {
      std::this_thread::sleep_for(milliseconds(20));
      world[0].reset();
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(InProcess, EndsInTheOrderRanksLike) {
  // The last call is over for a rank when it returns, so leaving then is no failure for slower ranks.
  for (int round = 0; round < 50; ++round) {
    auto world = make_in_process_world(3, kLong);
    std::vector<std::thread> threads;
    for (auto& communicator : world) {
      threads.emplace_back([mine = std::move(communicator)] {
        mine->barrier();
        mine->barrier();
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(Self, DoesItsPart) {
  auto self = make_self_communicator();
  EXPECT_EQ(self->rank(), 0);
  EXPECT_EQ(self->world(), 1);
  std::vector<double> values = {1.5, -0.0};
  self->all_reduce_sum(values);
  EXPECT_EQ(values[0], 1.5);
  const std::vector<std::byte> send = {std::byte{1}, std::byte{2}};
  std::vector<std::byte> receive(2);
  self->all_to_all(send, receive);
  EXPECT_EQ(send, receive);
  receive.resize(3);
  EXPECT_THROW(self->all_to_all(send, receive), CommunicatorError);
  self->all_gather(receive);
  self->barrier();
  EXPECT_EQ(self->failure(), "");
  self->abort("enough");
  EXPECT_EQ(self->failure(), "rank 0 aborted: enough");
  EXPECT_THROW(self->barrier(), CommunicatorError);
  EXPECT_THROW(self->all_gather(receive), CommunicatorError);
}

}  // namespace
}  // namespace overspill::engine
