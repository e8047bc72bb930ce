// Data-parallel training through the C++ API: the ranks divide each batch, and the model's states.
//
//   mpirun -n 2 ranks --stage 3 --steps 20        (ranks --help; without mpirun it is a world of one rank)
//
// A network of equal layers, y = tanh(W x + b), learns a fixed function of random points. Whatever the number
// of ranks and the stage, the loss of the whole batch is printed: the same to rounding.
#include <fmt/format.h>
#include <mpi.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <exception>
#include <filesystem>
#include <random>
#include <vector>

#include "cpu_optim/optimizer.h"
#include "engine/collectives/mpi.h"
#include "engine/engine.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"

namespace {

using overspill::engine::Config;
using overspill::engine::Engine;
using overspill::engine::Lease;
using overspill::engine::UnitSpec;
using overspill::optim::Format;

constexpr int kLayers = 4;
constexpr int kWidth = 64;
constexpr int kBatch = 24;  // of all ranks together
constexpr std::chrono::milliseconds kTimeout{60'000};

using Matrix = std::vector<float>;  // rows x kWidth

std::vector<UnitSpec> layers() {
  std::vector<UnitSpec> units;
  for (int l = 0; l < kLayers; ++l) {
    const std::string name = fmt::format("layer{}", l);
    units.push_back({name,
                     Format::fp32,
                     "F32",
                     {{name + ".w", {kWidth, kWidth}, 0, {}}, {name + ".b", {kWidth}, 0, {}}}});
  }
  return units;
}

Matrix random_matrix(unsigned seed, int rows, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  Matrix values(static_cast<size_t>(rows) * kWidth);
  for (float& value : values) value = normal(random);
  return values;
}

/// Every rank gives the engine all weights; it keeps its shard of them.
void initialise(Engine& engine) {
  for (int l = 0; l < kLayers; ++l) {
    const Matrix weight =
        random_matrix(static_cast<unsigned>(l) + 1, kWidth, 1.2F / std::sqrt(float{kWidth}));
    const Matrix bias(kWidth);
    engine.load_weight(l, 0, std::as_bytes(std::span(weight)), "F32");
    engine.load_weight(l, 1, std::as_bytes(std::span(bias)), "F32");
  }
}

const float* parameter(const Engine& engine, const Lease& lease, int unit, int segment) {
  return reinterpret_cast<const float*>(lease.data()) + engine.layout().units[unit].segments[segment].begin;
}

/// Forward, backward and step on the samples of one rank; its share of the batch's mean squared error.
double train(Engine& engine, int step, int rank, int world) {
  const int samples = kBatch / world;
  const Matrix batch = random_matrix(1000 + static_cast<unsigned>(step), kBatch, 1);
  std::vector<Matrix> x(kLayers + 1, Matrix(static_cast<size_t>(samples) * kWidth));
  std::copy_n(batch.begin() + rank * samples * kWidth, x[0].size(), x[0].begin());

  engine.begin_pass({.training = true, .grad_enabled = true});
  for (int l = 0; l < kLayers; ++l) {
    const Lease lease = engine.acquire(l);  // gathered from all ranks, ahead of use
    const float* w = parameter(engine, lease, l, 0);
    const float* bias = parameter(engine, lease, l, 1);
    for (int s = 0; s < samples; ++s) {
      for (int o = 0; o < kWidth; ++o) {
        float sum = bias[o];
        for (int i = 0; i < kWidth; ++i) sum += w[o * kWidth + i] * x[l][s * kWidth + i];
        x[l + 1][s * kWidth + o] = std::tanh(sum);
      }
    }
  }
  double loss = 0;
  Matrix slope(x[kLayers].size());  // the engine takes the mean over the ranks
  for (size_t i = 0; i < slope.size(); ++i) {
    const float error = x[kLayers][i] - 0.5F * std::sin(3 * x[0][i]);
    loss += double{error} * error / (kBatch * kWidth);
    slope[i] = 2 * error / static_cast<float>(samples * kWidth);
  }
  for (int l = kLayers - 1; l >= 0; --l) {
    const Lease lease = engine.acquire(l);
    const float* w = parameter(engine, lease, l, 0);
    Matrix grad_w(static_cast<size_t>(kWidth) * kWidth), grad_b(kWidth), before(slope.size());
    for (int s = 0; s < samples; ++s) {
      for (int o = 0; o < kWidth; ++o) {
        const float y = x[l + 1][s * kWidth + o];
        const float g = slope[s * kWidth + o] * (1 - y * y);
        grad_b[o] += g;
        for (int i = 0; i < kWidth; ++i) {
          grad_w[o * kWidth + i] += g * x[l][s * kWidth + i];
          before[s * kWidth + i] += g * w[o * kWidth + i];
        }
      }
    }
    // Summed over the ranks while backward goes on; only this rank's shard of the sum is kept.
    engine.add_gradient(l, 1, std::as_bytes(std::span(grad_b)), "F32");
    engine.add_gradient(l, 0, std::as_bytes(std::span(grad_w)), "F32");
    slope = std::move(before);
  }
  const overspill::optim::Hyper group = overspill::optim::AdamConfig{.lr = 1e-3, .weight_decay = 0.01};
  engine.step(std::span(&group, 1));
  return loss;
}

/// Losses of all ranks, on rank 0.
double sum_over_ranks(double own) {
  double sum = 0;
  MPI_Reduce(&own, &sum, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  return sum;
}

int run(overspill::engine::MpiSession& session, const Config& config, int steps, double expected) {
  auto communicator = session.make_communicator(kTimeout);
  const int rank = communicator->rank();
  const int world = communicator->world();
  if (kBatch % world != 0) throw std::runtime_error(fmt::format("{} ranks do not divide {}", world, kBatch));
  const std::vector<UnitSpec> units = layers();
  std::vector<double> losses;  // of this rank: the engine's thread calls MPI while there is an engine
  {
    Engine engine(units, config, make_resources(units, config, {}, std::move(communicator)));
    if (rank == 0)
      fmt::print("{} ranks, stage {}; on each of them\n{}", world, config.stage, engine.plan().text());
    initialise(engine);
    for (int step = 0; step < steps; ++step) losses.push_back(train(engine, step, rank, world));
  }
  double last = 0;
  for (int step = 0; step < steps; ++step) {
    last = sum_over_ranks(losses[step]);
    if (rank == 0 && (step % 5 == 0 || step == steps - 1))
      fmt::print("step {:>3}  loss {:.7f}\n", step, last);
  }
  if (rank != 0 || expected == 0 || std::abs(last - expected) <= 1e-5 * expected) return 0;
  fmt::print(stderr, "ranks: the last loss is {:.7f}, {:.7f} was expected\n", last, expected);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A network trained on batches that MPI's ranks divide, its states divided among them.");
  Config config;
  config.host_budget_bytes = int64_t{64} << 20;
  config.nvme = {std::filesystem::temp_directory_path()};
  int steps = 20;
  double expected = 0;
  app.add_option("--stage", config.stage,
                 "what the ranks divide: 0 nothing, 1 states, 2 gradients too, 3 weights too")
      ->check(CLI::Range(0, 3))
      ->capture_default_str();
  app.add_flag("--library-sums", config.library_sums,
               "let MPI sum the gradients, in its own order, instead of fp32 sums in rank order");
  app.add_option("--nvme", config.nvme, "folder for what is over the host budget")
      ->check(CLI::ExistingDirectory);
  app.add_option("--host-budget", config.host_budget_bytes,
                 "bytes of host memory that each rank's engine may use")
      ->capture_default_str();
  app.add_option("--steps", steps, "steps to train")->check(CLI::Range(1, 1'000'000))->capture_default_str();
  app.add_option("--expect-loss", expected, "fail unless the last loss is this one, to 1e-5 of it");
  app.footer("Example: mpirun -n 4 ranks --stage 2 --steps 100");
  CLI11_PARSE(app, argc, argv);
  try {
    overspill::engine::MpiSession session;
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    config.job = fmt::format("ranks-{}-{}", ::getpid(), rank);
    return run(session, config, steps, expected);
  } catch (const std::exception& error) {
    fmt::print(stderr, "ranks: {}\n", error.what());
    return 1;
  }
}
