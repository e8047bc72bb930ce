// The engine's ranks as processes: the same bits as in one process, at every stage.
#include "tests/engine/mpi_engine_test.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>

#include "engine/collectives/mpi.h"
#include "tests/engine/batch_model.h"
#include "tests/engine/rank_world.h"

namespace overspill::testing {
namespace {

using engine::Placement;
using std::chrono::milliseconds;

constexpr int kSteps = 4;

TEST(MpiEngine, EqualsTheScalarReferenceAtEveryStage) {
  engine::MpiSession session;
  for (int stage = 0; stage < 4; ++stage) {
    for (const Placement placement : {Placement::host, Placement::nvme}) {
      auto ranks = session.make_communicator(milliseconds(60'000));
      const int rank = ranks->rank(), world = ranks->world();
      const auto engine = toy_rank({.stage = stage, .placement = placement}, std::move(ranks));
      toy_load(*engine);
      std::vector<engine::StepResult> results;
      for (int step = 0; step < kSteps; ++step) results.push_back(toy_step(*engine, step, 1, rank).result);
      EXPECT_EQ(digest(toy_contents(*engine), results),
                digest(toy_reference(kSteps, 1, results, world), results))
          << "rank " << rank << " stage " << stage << " placement " << static_cast<int>(placement);
    }
  }
}

TEST(MpiEngine, LearnsWhatOneProcessLearnsOnTheWholeBatch) {
  engine::MpiSession session;
  for (const auto& [format, tolerance] :
       {std::pair{optim::Format::fp32, 1e-5}, {optim::Format::exact, 1e-3}}) {
    const BatchModel model{.format = format};
    for (const auto& [stage, library_sums] :
         {std::pair{0, false}, {1, false}, {2, false}, {3, false}, {1, true}, {2, true}}) {
      std::vector<double> own, one(20), losses(20);
      {
        auto ranks = session.make_communicator(milliseconds(60'000));
        const int rank = ranks->rank(), world = ranks->world();
        const auto engine =
            model_rank(model.units(), {.stage = stage, .max_grad_norm = 0, .library_sums = library_sums},
                       std::move(ranks));
        model.load(*engine);
        for (int step = 0; step < 20; ++step) own.push_back(model.train(*engine, step, rank, world));
      }
      on_ranks(1, [&](int, std::unique_ptr<engine::Communicator> alone) {
        const auto engine = model_rank(model.units(), {.max_grad_norm = 0, .job = "one"}, std::move(alone));
        model.load(*engine);
        for (int step = 0; step < 20; ++step) one[step] = model.train(*engine, step, 0, 1);
      });
      // Only now: while there is an engine, its thread calls MPI.
      MPI_Allreduce(own.data(), losses.data(), 20, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
      for (int step = 0; step < 20; ++step)
        EXPECT_NEAR(losses[step], one[step], tolerance * one[step])
            << "step " << step << " stage " << stage << (library_sums ? " by MPI's sums" : "");
    }
  }
}

}  // namespace

int engine_ends_badly(std::string_view how, unsigned long seed) {
  engine::MpiSession session;
  auto ranks = session.make_communicator(milliseconds(20'000));
  const int rank = ranks->rank();
  std::mt19937 random(static_cast<unsigned>(seed));
  int left = rank == 1 ? 1 + static_cast<int>(random() % 300) : 1'000'000;
  try {
    const auto engine = toy_rank(
        {.stage = static_cast<int>(seed % 4), .rank_timeout_ms = how == "engine-hangs" ? 2000 : 60'000},
        std::move(ranks));
    toy_load(*engine);
    for (int step = 0; step < 1000; ++step) {
      engine->begin_pass({true, true});
      for (int i = 0; i < 12; ++i) {
        const int unit = i < 6 ? i : 11 - i;
        const engine::Lease lease = engine->acquire(unit);
        if (i >= 6) toy_backward(*engine, lease, unit, step, 0, rank);
        if (--left > 0) continue;
        if (how == "engine-hangs") std::this_thread::sleep_for(std::chrono::hours(1));
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));  // somewhere in a round
        _exit(3);
      }
      engine->step(toy_groups(step));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d says: %s\n", rank, error.what());
    return 4;
  }
  return 0;
}

}  // namespace overspill::testing
