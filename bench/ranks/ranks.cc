// Stages 0 to 3 over several ranks: bytes a rank holds, bytes it sends, and how far the losses are from those
// of one process on the whole batch. One line of JSON a stage; bench/ranks/run.py runs it and makes the
// table.
//
//   bench_ranks --world 3              ranks that are threads
//   mpirun -n 3 bench_ranks_mpi        ranks that are processes
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "engine/collectives/counting.h"
#include "engine/collectives/in_process.h"
#include "engine/resources.h"
#include "tests/engine/batch_model.h"
#ifdef OVERSPILL_BENCH_MPI
#include "engine/collectives/mpi.h"
#endif

namespace {

using overspill::engine::Communicator;
using overspill::engine::Engine;
using overspill::engine::Traffic;
using overspill::testing::BatchModel;

constexpr int kSteps = 20;     // of losses
constexpr int kDeepSteps = 8;  // of bytes
constexpr std::chrono::milliseconds kTimeout{120'000};

/// For bytes: many layers, so that buffers of a few units are small beside the model.
const BatchModel kDeep{.layers = 48, .width = 160, .batch = 12, .format = overspill::optim::Format::exact};
/// For losses: so deep a net would make much of the last bit of a gradient.
const BatchModel kShallow{.format = overspill::optim::Format::exact};

/// Of one rank.
struct Measured {
  std::vector<double> losses;  // its shares
  int64_t elements = 0;        // of the model, with padding
  int64_t held_bytes = 0;      // weights, gradients, states: what grows with the model
  int64_t buffer_bytes = 0;    // all else that the plan charges
  int64_t sent_bytes = 0;      // of weights and gradients, a step
  int64_t said_bytes = 0;      // of announcements, norms and the like, a step
};

Measured train(const BatchModel& model, int steps, int stage, std::unique_ptr<Communicator> ranks) {
  const int rank = ranks->rank(), world = ranks->world();
  overspill::engine::Config config;
  config.stage = stage;
  config.host_budget_bytes = int64_t{1} << 30;
  config.job = fmt::format("bench-ranks-{}-{}", ::getpid(), rank);
  config.threads = 1;
  config.prefetch_units = 1;
  const auto units = model.units();
  const auto traffic = std::make_shared<Traffic>();
  Engine engine(units, config, make_resources(units, config, {}, count_traffic(std::move(ranks), traffic)));
  model.load(engine);
  Measured out;
  const auto data = [&] { return traffic->exchanged.sent_bytes.load(); };
  const auto said = [&] { return traffic->gathered.sent_bytes + traffic->reduced.sent_bytes; };
  int64_t data_before = 0, said_before = 0;
  for (int step = 0; step < steps; ++step) {
    if (step == 2) data_before = data(), said_before = said();  // by now it gathers ahead
    out.losses.push_back(model.train(engine, step, rank, world));
  }
  out.sent_bytes = (data() - data_before) / (steps - 2);
  out.said_bytes = (said() - said_before) / (steps - 2);
  for (const auto& unit : engine.layout().units) out.elements += unit.elements;
  const auto& plan = engine.plan();
  out.held_bytes = plan.weights_host_bytes + plan.states_host_bytes + plan.gradients_host_bytes;
  out.buffer_bytes = plan.host_bytes() - out.held_bytes;
  return out;
}

double formula(int stage, int world) {
  const double w = world;
  if (world == 1) return 14;
  return stage == 0 ? 14 : stage == 1 ? 4 + 10 / w : stage == 2 ? 2 + 12 / w : 14 / w;
}

void print_row(const char* transport, int stage, int world, const Measured& rank,
               const std::vector<double>& losses, const std::vector<double>& alone) {
  double worst = 0;
  for (size_t i = 0; i < losses.size(); ++i)
    worst = std::max(worst, std::abs(losses[i] - alone[i]) / alone[i]);
  const auto elements = static_cast<double>(rank.elements);
  const double plain = 2.0 * 2.0 * elements * (world - 1) / world;  // a ring's all-reduce of bf16 gradients
  const nlohmann::json row = {
      {"transport", transport},
      {"world", world},
      {"stage", stage},
      {"bytes_per_param", static_cast<double>(rank.held_bytes) / elements},
      {"formula", formula(stage, world)},
      {"buffer_bytes", rank.buffer_bytes},
      {"volume_vs_data_parallel", world > 1 ? static_cast<double>(rank.sent_bytes) / plain : 0},
      {"announced_vs_data_parallel", world > 1 ? static_cast<double>(rank.said_bytes) / plain : 0},
      {"loss_diff", worst}};
  fmt::print("{}\n", row.dump());
  std::fflush(stdout);
}

[[maybe_unused]] std::vector<Measured> train_in_process(const BatchModel& model, int steps, int stage,
                                                        int world) {
  auto ranks = overspill::engine::make_in_process_world(world, kTimeout);
  std::vector<Measured> out(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] { out[rank] = train(model, steps, stage, std::move(ranks[rank])); });
  for (std::thread& thread : threads) thread.join();
  return out;
}

std::vector<double> losses_alone() {
  return train_in_process(kShallow, kSteps, 3, 1)[0].losses;
}

}  // namespace

#ifdef OVERSPILL_BENCH_MPI

#include <mpi.h>

int main() {
  overspill::engine::MpiSession session;
  const std::vector<double> alone = losses_alone();
  for (int stage = 0; stage < 4; ++stage) {
    const Measured own = train(kDeep, kDeepSteps, stage, session.make_communicator(kTimeout));
    auto ranks = session.make_communicator(kTimeout);
    const int rank = ranks->rank(), world = ranks->world();
    const std::vector<double> shares = train(kShallow, kSteps, stage, std::move(ranks)).losses;
    std::vector<double> losses(shares.size());
    MPI_Allreduce(shares.data(), losses.data(), static_cast<int>(losses.size()), MPI_DOUBLE, MPI_SUM,
                  MPI_COMM_WORLD);
    if (rank == 0) print_row("mpi", stage, world, own, losses, alone);
  }
}

#else

int main(int argc, char** argv) {
  CLI::App app("Stages 0 to 3 over ranks that are threads: bytes held, bytes sent, losses.");
  int world = 2;
  app.add_option("--world", world, "ranks")->check(CLI::Range(1, 12))->capture_default_str();
  app.footer("Example: bench_ranks --world 4");
  CLI11_PARSE(app, argc, argv);
  const std::vector<double> alone = losses_alone();
  for (int stage = 0; stage < 4; ++stage) {
    const Measured own = train_in_process(kDeep, kDeepSteps, stage, world)[0];
    const std::vector<Measured> ranks = train_in_process(kShallow, kSteps, stage, world);
    std::vector<double> losses(ranks[0].losses.size());
    for (const Measured& rank : ranks) {
      for (size_t i = 0; i < losses.size(); ++i) losses[i] += rank.losses[i];
    }
    print_row("in-process", stage, world, own, losses, alone);
  }
}

#endif
