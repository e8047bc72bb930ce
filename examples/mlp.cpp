// A two-layer perceptron trained through the C++ API alone, its states over the host budget: they live on
// NVMe.
//
//   mlp --nvme /mnt/disk --steps 200        (mlp --help)
//
// The net learns y = sin(3 x0) * x1 on random points. After training it prints, for one step, which buffer
// belonged to which layer at which moment: slot N is a buffer of the ring through which states come from NVMe
// and go back.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <exception>
#include <filesystem>
#include <random>
#include <vector>

#include "cpu_optim/optimizer.h"
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

constexpr int kInputs = 2;
constexpr int kHidden = 65536;
constexpr int kBatch = 32;

/// One layer a unit: weight (outputs x inputs, row-major), bias (outputs), both fp32.
std::vector<UnitSpec> layers() {
  return {{"layer 1", Format::fp32, "F32", {{"w1", {kHidden, kInputs}, 0, {}}, {"b1", {kHidden}, 0, {}}}},
          {"layer 2", Format::fp32, "F32", {{"w2", {1, kHidden}, 0, {}}, {"b2", {1}, 0, {}}}}};
}

const float* parameter(const Engine& engine, const Lease& lease, int unit, int segment) {
  return reinterpret_cast<const float*>(lease.data()) + engine.layout().units[unit].segments[segment].begin;
}

void initialise(Engine& engine) {
  std::mt19937 random(1);
  const auto fill = [&](int unit, int segment, size_t count, float scale) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(count);
    for (float& value : values) value = normal(random);
    engine.load_weight(unit, segment, std::as_bytes(std::span(values)), "F32");
  };
  fill(0, 0, static_cast<size_t>(kHidden) * kInputs, 1.5F);
  fill(0, 1, kHidden, 1.0F);
  fill(1, 0, kHidden, 1.0F / std::sqrt(static_cast<float>(kHidden)));
  fill(1, 1, 1, 0.0F);
}

struct Batch {
  std::vector<float> x;  // kBatch x kInputs
  std::vector<float> y;  // kBatch
};

Batch make_batch(std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  Batch batch;
  for (int b = 0; b < kBatch; ++b) {
    const float x0 = uniform(random);
    const float x1 = uniform(random);
    batch.x.insert(batch.x.end(), {x0, x1});
    batch.y.push_back(std::sin(3 * x0) * x1);
  }
  return batch;
}

/// Forward and backward over one batch, gradients handed to the engine; returns the mean squared error.
float train_batch(Engine& engine, const Batch& batch) {
  std::vector<float> hidden(static_cast<size_t>(kBatch) * kHidden);
  std::vector<float> slope(kBatch);  // d loss / d output
  float loss = 0;
  engine.begin_pass({.training = true, .grad_enabled = true});
  {
    const Lease lease = engine.acquire(0);
    const float* w = parameter(engine, lease, 0, 0);
    const float* bias = parameter(engine, lease, 0, 1);
    for (int b = 0; b < kBatch; ++b) {
      for (int h = 0; h < kHidden; ++h) {
        const float sum = w[h * 2] * batch.x[b * 2] + w[h * 2 + 1] * batch.x[b * 2 + 1] + bias[h];
        hidden[static_cast<size_t>(b) * kHidden + h] = std::max(0.0F, sum);
      }
    }
  }
  std::vector<float> grad_w2(kHidden);
  std::vector<float> grad_w1(static_cast<size_t>(kHidden) * kInputs);
  std::vector<float> grad_b1(kHidden);
  float grad_b2 = 0;
  {
    const Lease lease = engine.acquire(1);
    const float* w = parameter(engine, lease, 1, 0);
    const float bias = *parameter(engine, lease, 1, 1);
    for (int b = 0; b < kBatch; ++b) {
      const float* h = hidden.data() + static_cast<size_t>(b) * kHidden;
      float output = bias;
      for (int i = 0; i < kHidden; ++i) output += w[i] * h[i];
      const float error = output - batch.y[b];
      loss += error * error / kBatch;
      slope[b] = 2 * error / kBatch;
      grad_b2 += slope[b];
      for (int i = 0; i < kHidden; ++i) {
        grad_w2[i] += slope[b] * h[i];
        if (h[i] == 0) continue;
        grad_b1[i] += slope[b] * w[i];
        grad_w1[i * 2] += slope[b] * w[i] * batch.x[b * 2];
        grad_w1[i * 2 + 1] += slope[b] * w[i] * batch.x[b * 2 + 1];
      }
    }
  }
  engine.add_gradient(1, 0, std::as_bytes(std::span(grad_w2)), "F32");
  engine.add_gradient(1, 1, std::as_bytes(std::span(&grad_b2, 1)), "F32");
  engine.add_gradient(0, 0, std::as_bytes(std::span(grad_w1)), "F32");
  engine.add_gradient(0, 1, std::as_bytes(std::span(grad_b1)), "F32");
  return loss;
}

void print_journal(Engine& engine) {
  const auto entries = engine.take_journal();
  if (entries.empty()) return;
  fmt::print("\none step, buffer by buffer (microseconds since its begin)\n{:>8}  {:<8} {:>5}  {:<8} {}\n",
             "time", "layer", "chunk", "buffer", "what");
  for (const auto& entry : entries) {
    const std::string buffer = entry.slot >= 0 ? fmt::format("slot {}", entry.slot) : "-";
    const std::string chunk = entry.chunk >= 0 ? fmt::format("{}", entry.chunk) : "-";
    fmt::print("{:>8}  {:<8} {:>5}  {:<8} {}\n", (entry.time_ns - entries.front().time_ns) / 1000,
               entry.unit >= 0 ? engine.layout().units[entry.unit].name : "-", chunk, buffer,
               overspill::engine::happening_name(entry.happening));
  }
}

int run(const std::filesystem::path& folder, int64_t budget_bytes, int steps) {
  Config config;
  config.host_budget_bytes = budget_bytes;
  config.nvme = {folder};
  config.job = fmt::format("mlp-{}", ::getpid());
  config.max_grad_norm = 1.0;
  config.chunk_elements = 32 * 1024;
  const std::vector<UnitSpec> units = layers();
  Engine engine(units, config, make_resources(units, config, {}));
  fmt::print("where things are\n{}", engine.plan().text());
  if (engine.plan().nvme_bytes() == 0) throw std::runtime_error("the states were meant to be over budget");

  initialise(engine);
  std::mt19937 random(2);
  float first = 0;
  float last = 0;
  for (int step = 0; step < steps; ++step) {
    engine.record_journal(step == steps - 2);
    last = train_batch(engine, make_batch(random));
    if (step == 0) first = last;
    const overspill::optim::Hyper group = overspill::optim::AdamConfig{.lr = 1e-4, .weight_decay = 0.01};
    const auto result = engine.step(std::span(&group, 1));
    if (step % 20 == 0)
      fmt::print("step {:>3}  loss {:.4f}  gradient norm {:.3f}\n", step, last, result.norm);
  }
  engine.record_journal(false);
  engine.synchronize();
  print_journal(engine);
  const auto stats = engine.stats();
  fmt::print(
      "\nloss {:.4f} -> {:.4f}; host {:.2f} MB of {:.2f} MB; NVMe {:.1f} MB read, {:.1f} MB written ({})\n",
      first, last, static_cast<double>(stats.host_peak_bytes) / 1e6,
      static_cast<double>(stats.host_budget_bytes) / 1e6, static_cast<double>(stats.store.bytes_read) / 1e6,
      static_cast<double>(stats.store.bytes_written) / 1e6, stats.store.backend);
  return last < first ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A two-layer perceptron whose optimizer states are over the host budget and live on NVMe.");
  std::filesystem::path folder = std::filesystem::temp_directory_path();
  int64_t budget_bytes = 3'500'000;
  int steps = 200;
  app.add_option("--nvme", folder, "folder for the states")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  app.add_option("--host-budget", budget_bytes, "bytes of host memory that the engine may use")
      ->capture_default_str();
  app.add_option("--steps", steps, "steps to train")->check(CLI::Range(2, 1'000'000))->capture_default_str();
  app.footer("Example: mlp --nvme /mnt/disk --steps 500");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(folder, budget_bytes, steps);
  } catch (const std::exception& error) {
    fmt::print(stderr, "mlp: {}\n", error.what());
    return 2;
  }
}
