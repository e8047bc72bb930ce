// The MPI transport, under mpirun: each rank is a process that runs these tests. A failing rank fails the
// run.
//
// Exit codes are mpirun's. `mpi_test dies` and `mpi_test hangs` are for the tests that look at what mpirun
// says.
#include "engine/collectives/mpi.h"

#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <thread>

#include "tests/engine/collectives_conformance.h"
#include "tests/engine/mpi_engine_test.h"

namespace overspill::engine {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{20'000};

std::string what_it_throws(milliseconds timeout, const std::function<void(Communicator&)>& body) {
  MpiSession session;
  const auto ranks = session.make_communicator(timeout);
  try {
    body(*ranks);
  } catch (const CommunicatorError& error) {
    try {
      ranks->barrier();
      ADD_FAILURE() << "a world that has ended goes on";
    } catch (const CommunicatorError& again) {
      EXPECT_STREQ(std::strchr(error.what(), ':'), std::strchr(again.what(), ':'))
          << "the first reason stays";
    }
    return error.what();
  }
  return "";
}

void expect_says(const std::string& error, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(error.find(part), std::string::npos) << "'" << part << "' in: " << error;
}

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

TEST(Mpi, MovesEverySlice) {
  EXPECT_EQ(what_it_throws(kLong, [](Communicator& ranks) { conformance::move_every_slice(ranks); }), "");
}

TEST(Mpi, ExchangesWhatEachPairWants) {
  EXPECT_EQ(what_it_throws(kLong, [](Communicator& ranks) { conformance::exchange_together(ranks); }), "");
  EXPECT_EQ(
      what_it_throws(kLong, [](Communicator& ranks) { conformance::exchange_what_each_pair_wants(ranks); }),
      "");
}

TEST(Mpi, RefusesAnOddPair) {
  if (world_size() < 2) GTEST_SKIP() << "needs two ranks; this world has one";
  expect_says(what_it_throws(kLong, conformance::an_odd_pair), {"rank 0 sends 8 bytes to rank 1"});
}

TEST(Mpi, SumsInRankOrderToTheBit) {
  EXPECT_EQ(what_it_throws(kLong, conformance::sum_in_rank_order_to_the_bit), "");
}

TEST(Mpi, ReducesAndScatters) {
  EXPECT_EQ(what_it_throws(kLong, [](Communicator& ranks) { conformance::reduce_and_scatter(ranks); }), "");
  expect_says(what_it_throws(kLong, conformance::a_sum_of_another_size), {"reduce_scatter_sum", "rank 0"});
}

TEST(Mpi, ABarrierHoldsEverybody) {
  // Each rank leaves a file before the barrier; after it all of them are there.
  std::string folder = "/tmp/test-of-overspill-mpi-XXXXXX";
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) {
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
  }
  MPI_Bcast(folder.data(), static_cast<int>(folder.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
  EXPECT_EQ(what_it_throws(kLong,
                           [&](Communicator& ranks) {
                             for (int round = 0; round < 20; ++round) {
                               const auto name = [&](int of) {
                                 return std::filesystem::path(folder) / std::to_string(round * 100 + of);
                               };
                               std::this_thread::sleep_for(milliseconds((ranks.rank() + round) % 3));
                               std::ofstream(name(ranks.rank())) << "here";
                               ranks.barrier();
                               for (int other = 0; other < ranks.world(); ++other)
                                 EXPECT_TRUE(std::filesystem::exists(name(other))) << round << ' ' << other;
                             }
                           }),
            "");
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) std::filesystem::remove_all(folder);
}

TEST(Mpi, RefusesSizesThatDiffer) {
  expect_says(what_it_throws(kLong, conformance::sizes_that_differ), {"all_to_all", "rank"});
  if (world_size() > 1)
    expect_says(what_it_throws(kLong, conformance::a_size_that_is_not_a_multiple),
                {"all_gather", "not a multiple"});
}

TEST(Mpi, NamesTheRankThatMakesAnotherCall) {
  if (world_size() < 2) GTEST_SKIP() << "needs two ranks; this world has one";
  expect_says(what_it_throws(kLong, conformance::another_call), {"rank 1", "all_to_all", "all_gather"});
}

TEST(Mpi, NamesTheRankThatIsLateOnEveryRank) {
  if (world_size() < 2) GTEST_SKIP() << "needs two ranks; this world has one";
  MPI_Barrier(MPI_COMM_WORLD);  // how late a rank is does not depend on when it was started
  const std::string error = what_it_throws(milliseconds(1000), [](Communicator& ranks) {
    if (ranks.rank() == 1) std::this_thread::sleep_for(milliseconds(4000));
    ranks.barrier();
  });
  expect_says(error, {"barrier", "rank 1 did not join within 1000 ms"});
}

TEST(Mpi, AbortEndsTheWorld) {
  if (world_size() < 2) GTEST_SKIP() << "needs two ranks; this world has one";
  const std::string error = what_it_throws(kLong, [](Communicator& ranks) {
    ranks.barrier();
    if (ranks.rank() == 1) ranks.abort("the disk is full");
    ranks.barrier();
  });
  expect_says(error, {"barrier", "rank 1 aborted: the disk is full"});
}

TEST(Mpi, HearsOfAnAbortWithoutACall) {
  if (world_size() < 2) GTEST_SKIP() << "needs two ranks; this world has one";
  const std::string error = what_it_throws(kLong, [](Communicator& ranks) {
    for (int round = 0; round < 20; ++round) {
      EXPECT_EQ(ranks.failure(), "") << "nothing but a failure is heard";
      ranks.barrier();  // nobody aborts before all have looked
    }
    if (ranks.rank() == 1) ranks.abort("the disk is full");
    const auto give_up = std::chrono::steady_clock::now() + kLong;
    while (ranks.failure().empty() && std::chrono::steady_clock::now() < give_up)
      std::this_thread::sleep_for(milliseconds(1));
    EXPECT_NE(ranks.failure().find("rank 1 aborted: the disk is full"), std::string::npos) << ranks.failure();
    ranks.barrier();
  });
  expect_says(error, {"barrier", "rank 1 aborted: the disk is full"});
}

/// Rank 1 dies, or sleeps for good, inside a run of calls; the others' calls never come back by themselves.
int end_badly(std::string_view how) {
  MpiSession session;
  const auto ranks = session.make_communicator(how == "hangs" ? milliseconds(2000) : milliseconds(60'000));
  conformance::move_every_slice(*ranks, 5);
  if (ranks->rank() == 1) {
    if (how == "dies") _exit(3);
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
  try {
    conformance::move_every_slice(*ranks, 1000);
  } catch (const CommunicatorError& error) {
    std::fprintf(stderr, "rank %d says: %s\n", ranks->rank(), error.what());
    return 4;
  }
  return 0;
}

}  // namespace
}  // namespace overspill::engine

int main(int argc, char** argv) {
  if (argc == 3 && std::string_view(argv[1]).starts_with("engine-"))
    return overspill::testing::engine_ends_badly(argv[1], std::strtoul(argv[2], nullptr, 10));
  if (argc == 2 && (argv[1] == std::string_view("dies") || argv[1] == std::string_view("hangs")))
    return overspill::engine::end_badly(argv[1]);
  testing::InitGoogleTest(&argc, argv);
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  const int result = RUN_ALL_TESTS();
  int worst = 0;
  MPI_Allreduce(&result, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return worst;
}
