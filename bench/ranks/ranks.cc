// Stages 0 to 3 over several ranks: bytes a rank holds, bytes it sends, and how far the losses are from those
// of one process on the whole batch. One line of JSON a stage; bench/ranks/run.py runs it and makes the
// table.
//
//   bench_ranks --world 3              ranks that are threads
//   mpirun -n 3 bench_ranks_mpi        ranks that are processes
//   torchrun --nproc_per_node=3 bench/ranks/gloo.py   (gloo.cc)
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <thread>
#include <vector>

#include "bench/ranks/row.h"

#ifdef OVERSPILL_BENCH_MPI
#include "engine/collectives/mpi.h"
#else
#include "engine/collectives/in_process.h"
#endif

namespace {

constexpr std::chrono::milliseconds kTimeout{120'000};

void print(const std::string& row) {
  fmt::print("{}\n", row);
  std::fflush(stdout);
}

}  // namespace

#ifdef OVERSPILL_BENCH_MPI

int main() {
  overspill::engine::MpiSession session;
  for (int stage = 0; stage < 4; ++stage) {
    int rank = 0;
    const std::string row = overspill::bench::measure_row("mpi", stage, [&] {
      auto ranks = session.make_communicator(kTimeout);
      rank = ranks->rank();
      return ranks;
    });
    if (rank == 0) print(row);
  }
}

#else

int main(int argc, char** argv) {
  CLI::App app("Stages 0 to 3 over ranks that are threads: bytes held, bytes sent, losses.");
  int world = 2;
  app.add_option("--world", world, "ranks")->check(CLI::Range(1, 12))->capture_default_str();
  app.footer("Example: bench_ranks --world 4");
  CLI11_PARSE(app, argc, argv);
  for (int stage = 0; stage < 4; ++stage) {
    std::vector<std::vector<std::unique_ptr<overspill::engine::Communicator> > > worlds;
    for (int i = 0; i < overspill::bench::kJoins; ++i)
      worlds.push_back(overspill::engine::make_in_process_world(world, kTimeout));
    std::vector<std::string> rows(static_cast<size_t>(world));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
      threads.emplace_back([&, rank, next = size_t{0}]() mutable {
        rows[rank] = overspill::bench::measure_row("in-process", stage,
                                                   [&] { return std::move(worlds[next++][rank]); });
      });
    }
    for (std::thread& thread : threads) thread.join();
    print(rows[0]);
  }
}

#endif
