// NCCL against a small stand-in, on simulated devices: whatever is not waited for reads as poison.
#include "engine/collectives/nccl.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "engine/collectives/in_process.h"
#include "engine/collectives/nccl_library.h"
#include "engine/collectives/self_communicator.h"
#include "engine/plan/plan.h"
#include "kernels/host_device.h"
#include "kernels/simulated_device.h"
#include "tests/engine/collectives_conformance.h"
#include "tests/engine/fake_nccl.h"
#include "tests/engine/rank_world.h"

namespace overspill::engine {
namespace {

using fake_nccl::Fault;
using std::chrono::milliseconds;
constexpr milliseconds kLong{20'000};
constexpr milliseconds kForEver =
    std::chrono::hours(1);  // what waits for it is ended by ctest, and has failed

std::string library(const char* variant = "") {
  return std::string(FAKE_NCCL_FOLDER "libfake_nccl") + variant + ".so";
}

const fake_nccl::Controls& fake() {
  static const fake_nccl::Controls* const controls = [] {
    void* opened = ::dlopen(library().c_str(), RTLD_NOW | RTLD_LOCAL);
    auto* const get =
        reinterpret_cast<const fake_nccl::Controls* (*)()>(::dlsym(opened, "fake_nccl_controls"));
    return get();
  }();
  return *controls;
}

NcclOptions small_pieces(milliseconds timeout = kLong) {
  return {.library = library(), .staging_bytes = 8192, .small_bytes = 0, .timeout = timeout};
}

std::shared_ptr<kernels::Device> fast_device(int rank) {
  kernels::SimulatedDeviceOptions device{.seed = static_cast<uint64_t>(rank) + 1};
  device.delay_max = std::chrono::microseconds(20);
  return kernels::make_simulated_device(device);
}

std::unique_ptr<Communicator> join(std::unique_ptr<Communicator> control, const NcclOptions& options) {
  auto device = fast_device(control->rank());
  return make_nccl_communicator(std::move(control), std::move(device), options);
}

/// Runs body(communicator) on one thread a rank; returns what each rank threw ("" for nothing).
std::vector<std::string> run_world(int ranks, const std::function<NcclOptions(int)>& options,
                                   const std::function<void(Communicator&)>& body,
                                   milliseconds control_timeout = kLong) {
  auto control = make_in_process_world(ranks, control_timeout);
  std::vector<std::string> errors(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto nccl = join(std::move(control[rank]), options(rank));
        EXPECT_EQ(nccl->rank(), rank);
        EXPECT_EQ(nccl->world(), ranks);
        try {
          body(*nccl);
        } catch (const CommunicatorError& error) {
          errors[rank] = error.what();
          try {
            nccl->barrier();
            ADD_FAILURE() << "a world that has ended goes on";
          } catch (const CommunicatorError& again) {
            const std::string first = error.what();
            EXPECT_EQ(again.what(), "barrier" + first.substr(first.find(": "))) << "the first reason stays";
          }
        }
      } catch (const CommunicatorError& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

std::vector<std::string> run_world(int ranks, const std::function<void(Communicator&)>& body,
                                   const NcclOptions& options = small_pieces()) {
  return run_world(
      ranks, [&](int) { return options; }, body);
}

void expect_all_say(const std::vector<std::string>& errors, std::initializer_list<const char*> parts) {
  for (const std::string& error : errors) {
    for (const char* part : parts)
      EXPECT_NE(error.find(part), std::string::npos) << "'" << part << "' in: " << error;
  }
}

void expect_nothing_said(const std::vector<std::string>& errors) {
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

/// After every test the stand-in has no communicator left, and was not misused.
class WithFakeNccl {
 protected:
  WithFakeNccl() { fake().inject(Fault::none, 0, 0); }
  ~WithFakeNccl() {
    EXPECT_EQ(fake().live(), 0) << "communicators were neither destroyed nor aborted";
    EXPECT_EQ(fake().misuses(), misuses_);
  }
  const int64_t misuses_ = fake().misuses();
};

class NcclWorlds : public ::testing::TestWithParam<int>, WithFakeNccl {};
INSTANTIATE_TEST_SUITE_P(Nccl, NcclWorlds, ::testing::Values(1, 2, 3, 4));

TEST_P(NcclWorlds, MoveEverySlice) {
  const int64_t calls = fake().calls();
  expect_nothing_said(
      run_world(GetParam(), [](Communicator& ranks) { conformance::move_every_slice(ranks); }));
  if (GetParam() > 1) {
    EXPECT_GT(fake().calls(), calls + 100) << "in pieces, over NCCL";
  }
}

TEST_P(NcclWorlds, ExchangeWhatEachPairWants) {
  expect_nothing_said(
      run_world(GetParam(), [](Communicator& ranks) { conformance::exchange_what_each_pair_wants(ranks); }));
}

TEST_P(NcclWorlds, ExchangeFromEitherMemory) {
  const auto errors = testing::on_ranks(GetParam(), [](int rank, std::unique_ptr<Communicator> control) {
    const auto device = fast_device(rank);
    const auto ranks = make_nccl_communicator(std::move(control), device, small_pieces());
    conformance::exchange_from_either_memory(*ranks, *device);
  });
  expect_nothing_said(errors);
}

TEST_P(NcclWorlds, RefuseAnOddPair) {
  if (GetParam() < 2) GTEST_SKIP() << "a pair needs two ranks";
  expect_all_say(run_world(GetParam(), conformance::an_odd_pair),
                 {"exchange: rank 0 sends 8 bytes to rank 1, which has room for 16"});
}

TEST_P(NcclWorlds, SumInRankOrderToTheBit) {
  expect_nothing_said(run_world(GetParam(), conformance::sum_in_rank_order_to_the_bit));
}

TEST_P(NcclWorlds, ReduceAndScatter) {
  const int64_t calls = fake().calls();
  expect_nothing_said(
      run_world(GetParam(), [](Communicator& ranks) { conformance::reduce_and_scatter(ranks); }));
  EXPECT_GT(fake().calls(), calls + 100) << "in pieces, over NCCL";
  expect_all_say(run_world(GetParam(), conformance::a_sum_of_another_size), {"reduce_scatter_sum", "rank 0"});
}

TEST_P(NcclWorlds, RefuseSizesThatDiffer) {
  expect_all_say(run_world(GetParam(), conformance::sizes_that_differ), {"all_to_all", "rank"});
  if (GetParam() > 1)
    expect_all_say(run_world(GetParam(), conformance::a_size_that_is_not_a_multiple),
                   {"all_gather", "not a multiple"});
}

TEST_P(NcclWorlds, SendSmallCallsPastNccl) {
  NcclOptions options = small_pieces();
  options.small_bytes = 1 << 20;
  const int64_t calls = fake().calls();
  expect_nothing_said(run_world(
      GetParam(), [](Communicator& ranks) { conformance::move_every_slice(ranks, 10); }, options));
  EXPECT_EQ(fake().calls(), calls);
  options.small_bytes = 10'000;  // now one way, now the other
  expect_nothing_said(run_world(
      GetParam(), [](Communicator& ranks) { conformance::move_every_slice(ranks); }, options));
  if (GetParam() > 1) {
    EXPECT_GT(fake().calls(), calls);
  }
}

TEST_P(NcclWorlds, BarrierHoldsEverybody) {
  std::atomic<int> arrived = 0;
  expect_nothing_said(run_world(GetParam(), [&](Communicator& ranks) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      ranks.barrier();
      EXPECT_GE(arrived, round * ranks.world());
      ranks.barrier();
    }
  }));
}

class Nccl : public ::testing::Test, WithFakeNccl {};

TEST_F(Nccl, NamesTheRankThatMakesAnotherCall) {
  expect_all_say(run_world(3, conformance::another_call), {"rank 1", "all_to_all", "all_gather"});
}

TEST_F(Nccl, NamesTheRanksThatAreLateBeforeAGpuWaitsForThem) {
  const int64_t calls = fake().calls();
  const auto errors = run_world(
      4, [](int) { return small_pieces(); },
      [](Communicator& ranks) {
        if (ranks.rank() == 1 || ranks.rank() == 3) std::this_thread::sleep_for(milliseconds(1500));
        std::vector<std::byte> data(4096);
        ranks.all_gather(data);
      },
      milliseconds(500));
  expect_all_say(errors, {"all_gather: rank 1, 3 did not join within 500 ms"});
  EXPECT_EQ(fake().calls(), calls);
}

void gather_ten_times(Communicator& ranks) {
  for (int round = 0; round < 10; ++round) {
    std::vector<std::byte> data(static_cast<size_t>(ranks.world()) * 4096);
    ranks.all_gather(data);
  }
}

TEST_F(Nccl, TellsEveryRankOfAnErrorThatCameLater) {
  fake().inject(Fault::error_later, 1, 5);
  expect_all_say(run_world(3, gather_ten_times, small_pieces(kForEver)),
                 {"all_gather: rank 1 aborted: NCCL: unhandled system error: the cable was pulled"});
}

TEST_F(Nccl, EndsACallThatDoesNotEnd) {
  for (const Fault fault : {Fault::hangs_on_the_device, Fault::never_begins}) {
    fake().inject(fault, 2, 4);
    const char* what = fault == Fault::never_begins ? "NCCL did not" : "NCCL did not finish";
    expect_all_say(run_world(3, gather_ten_times, small_pieces(milliseconds(300))),
                   {"all_gather: rank ", "aborted: all ranks joined, and ", what, "within 300 ms"});
  }
}

TEST_F(Nccl, EndsExchangesToo) {
  fake().inject(Fault::hangs_on_the_device, 0, 7);
  expect_all_say(run_world(
                     3, [](Communicator& ranks) { conformance::exchange_what_each_pair_wants(ranks); },
                     small_pieces(milliseconds(300))),
                 {": rank ", "aborted: all ranks joined, and NCCL did not finish within 300 ms"});
}

TEST_F(Nccl, AbortEndsCallsInProgressAndLaterOnes) {
  const auto errors = run_world(3, [](Communicator& ranks) {
    if (ranks.rank() == 2) ranks.abort("the disk is full");
    std::vector<std::byte> data(30'000);
    ranks.all_gather(data);
  });
  expect_all_say(errors, {"all_gather: rank 2 aborted: the disk is full"});
}

TEST_F(Nccl, AbortOnAnotherThreadEndsWhatTheDeviceWaitsFor) {
  fake().inject(Fault::hangs_on_the_device, 1, 0);
  const auto errors = run_world(
      2,
      [](Communicator& ranks) {
        std::thread other([&] {
          std::this_thread::sleep_for(milliseconds(100));
          if (ranks.rank() == 0) ranks.abort("the disk is full");
        });
        std::vector<std::byte> data(4096);
        try {
          ranks.all_gather(data);
        } catch (...) {
          other.join();
          throw;
        }
        other.join();
      },
      small_pieces(kForEver));
  expect_all_say(errors, {"all_gather: rank 0 aborted: the disk is full"});
}

TEST_F(Nccl, NobodyJoinsWithoutEverybody) {
  fake().inject(Fault::error_at_init, 2, 0);
  expect_all_say(run_world(3, gather_ten_times), {"start: rank 2 aborted: NCCL: unhandled system error"});
  fake().inject(Fault::never_joins, 2, 0);
  expect_all_say(run_world(3, gather_ten_times, small_pieces(milliseconds(300))),
                 {"start: rank ", "aborted: all ranks joined, and NCCL did not begin within 300 ms"});
}

/// Every rank says which one cannot take part, and why.
void expect_rank_1_cannot(const std::function<void(NcclOptions&)>& change,
                          std::initializer_list<const char*> parts) {
  const auto errors = run_world(
      3,
      [&](int rank) {
        NcclOptions options = small_pieces();
        if (rank == 1) change(options);
        return options;
      },
      gather_ten_times);
  expect_all_say(errors, parts);
}

TEST_F(Nccl, SaysWhichRanksLibraryIsOfNoUse) {
  expect_rank_1_cannot([](NcclOptions& options) { options.library = library("_old"); },
                       {"NCCL on rank 1: ", "libfake_nccl_old.so is NCCL 2.13.4; 2.14.0 is the oldest"});
  expect_rank_1_cannot([](NcclOptions& options) { options.library = library("_partial"); },
                       {"NCCL on rank 1: ", "libfake_nccl_partial.so has no ncclAllGather"});
  expect_rank_1_cannot([](NcclOptions& options) { options.library = "/nowhere/libnccl.so.2"; },
                       {"NCCL on rank 1: NCCL was not found: /nowhere/libnccl.so.2", "OVERSPILL_NCCL"});
}

TEST_F(Nccl, SaysWhichRanksOptionsAreOfNoUse) {
  expect_rank_1_cannot([](NcclOptions& options) { options.staging_bytes = 1535; },
                       {"NCCL on rank 1: 1535 bytes of staging are too few for 3 ranks; 1536 are enough"});
  expect_rank_1_cannot([](NcclOptions& options) { options.staging_bytes *= 2; },
                       {"rank 1 has 16384 bytes of staging", "rank 0 8192"});
  expect_rank_1_cannot([](NcclOptions& options) { options.small_bytes = 5; }, {"rank 1", "up to 5", "and 0"});
  try {
    (void)make_nccl_communicator(make_self_communicator(), kernels::make_host_device(), small_pieces());
    FAIL() << "NCCL on the host";
  } catch (const CommunicatorError& error) {
    EXPECT_STREQ(error.what(), "NCCL on rank 0: NCCL cannot work on a stream of a host device");
  }
}

TEST_F(Nccl, IsFoundByTheEnvironment) {
  ASSERT_EQ(::setenv("OVERSPILL_NCCL", library().c_str(), 1), 0);
  EXPECT_EQ(nccl::load({}).version, 22703);
  ASSERT_EQ(::unsetenv("OVERSPILL_NCCL"), 0);
  EXPECT_EQ(nccl::version_text(22703), "2.27.3");
  EXPECT_EQ(nccl::version_text(2804), "2.8.4");
}

/// The engine over it: the bits of the same world without NCCL, whether shards meet on its device, on the
/// host, or on each rank elsewhere, and whether they live on the device.
TEST_F(Nccl, TrainsToTheSameBits) {
  const auto train = [&](bool over_nccl, int reached_from_rank = 2, Placement placement = Placement::host) {
    std::vector<uint64_t> digests(2);
    const auto errors = testing::on_ranks(2, [&](int rank, std::unique_ptr<Communicator> control) {
      NcclOptions options = small_pieces();
      options.staging_bytes = 1 << 16;
      options.small_bytes = 1024;
      const auto device = fast_device(rank);
      const auto nccls = rank >= reached_from_rank ? device : fast_device(rank);
      auto ranks =
          over_nccl ? make_nccl_communicator(std::move(control), nccls, options) : std::move(control);
      const auto engine =
          testing::toy_rank({.placement = placement, .given_device = device}, std::move(ranks));
      const bool reached = rank >= reached_from_rank;
      EXPECT_EQ(engine->plan().gather_host_bytes == 0, reached);
      EXPECT_EQ(engine->plan().units_on_device(), reached && placement == Placement::device ? 5 : 0);
      testing::toy_load(*engine);
      std::vector<StepResult> results;
      for (int step = 0; step < 5; ++step)
        results.push_back(testing::toy_step(*engine, step, 1, rank).result);
      digests[rank] = testing::digest(testing::toy_contents(*engine), results);
      engine->close();
    });
    expect_nothing_said(errors);
    return digests;
  };
  const int64_t calls = fake().calls();
  const auto over_nccl = train(true);
  EXPECT_GT(fake().calls(), calls + 20);
  const auto without = train(false);
  EXPECT_EQ(over_nccl, without);
  EXPECT_EQ(train(true, 0), without) << "shards meet on the devices";
  EXPECT_EQ(train(true, 1), without) << "on rank 1's alone";
  EXPECT_EQ(train(true, 0, Placement::device), without) << "shards live on the devices";
  EXPECT_EQ(train(true, 1, Placement::device), without) << "on rank 1's alone";
}

/// A rank that looks at weights alone gets the others' shards from where they live, though they look at none.
TEST_F(Nccl, SendsShardsFromWhereTheyLive) {
  std::vector<std::vector<std::byte>> seen(2);
  std::barrier looked(2);
  const auto errors = testing::on_ranks(2, [&](int rank, std::unique_ptr<Communicator> control) {
    NcclOptions options = small_pieces();
    options.small_bytes = 0;
    const auto device = fast_device(rank);
    auto ranks = make_nccl_communicator(std::move(control), device, options);
    const auto engine =
        testing::toy_rank({.placement = Placement::device, .given_device = device}, std::move(ranks));
    testing::toy_load(*engine);
    testing::toy_step(*engine, 0, 1, rank);
    for (const int turn : {0, 1}) {
      looked.arrive_and_wait();
      if (turn == rank) {
        engine->begin_pass({false, false});
        seen[rank].resize(static_cast<size_t>(engine->layout().units[0].bytes()));
        engine->acquire(0).copy_to_host(0, seen[rank]);
      }
      looked.arrive_and_wait();
    }
    engine->close();
  });
  expect_nothing_said(errors);
  EXPECT_EQ(seen[0], seen[1]);
}

/// A lease keeps an engine's parts, and may end where a thread must not wait, such as with Python's lock.
TEST_F(Nccl, IsGivenUpByCloseAndNotByTheLastLease) {
  const int64_t live = fake().live();
  std::barrier closed(2);
  const auto errors = testing::on_ranks(2, [&](int rank, std::unique_ptr<Communicator> control) {
    const auto device = fast_device(rank);
    const auto engine = testing::toy_rank({.given_device = device},
                                          make_nccl_communicator(std::move(control), device, small_pieces()));
    testing::toy_load(*engine);
    Lease kept = engine->acquire(1);
    EXPECT_EQ(fake().live(), live + 2);
    engine->close();
    closed.arrive_and_wait();
    EXPECT_EQ(fake().live(), live);
    (void)engine->stats();
    kept = {};
  });
  expect_nothing_said(errors);
}

/// Its peers may not come to the end that NCCL waits for.
TEST_F(Nccl, EndsAtOnceWhereItsWorldHasFailed) {
  const int64_t live = fake().live();
  std::barrier failed(2);
  const auto errors = testing::on_ranks(2, [&](int rank, std::unique_ptr<Communicator> control) {
    auto nccl = join(std::move(control), small_pieces(kForEver));
    if (rank == 1) nccl->abort("on purpose");
    failed.arrive_and_wait();
    if (rank == 0) {
      nccl.reset();
      EXPECT_EQ(fake().live(), live + 1);
    }
    failed.arrive_and_wait();
  });
  expect_nothing_said(errors);
  EXPECT_EQ(fake().live(), live);
}

}  // namespace
}  // namespace overspill::engine
