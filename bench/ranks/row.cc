#include "bench/ranks/row.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/collectives/counting.h"
#include "engine/collectives/self_communicator.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "tests/engine/batch_model.h"

namespace overspill::bench {
namespace {

using engine::Engine;
using engine::Traffic;
using optim::Format;
using testing::BatchModel;

constexpr int kSteps = 20;     // of losses
constexpr int kDeepSteps = 8;  // of bytes

/// For bytes: many layers, so that buffers of a few units are small beside the model.
const BatchModel kDeep{.layers = 48, .width = 160, .batch = 12, .format = Format::exact};

/// For losses: so deep a net would make much of the last bit of a gradient.
BatchModel shallow(Format format) {
  return {.format = format};
}

/// Of one rank.
struct Measured {
  std::vector<double> losses;  // its shares
  uint64_t digest = 0;         // of all weights and states
  int64_t elements = 0;        // of the model, with padding
  int64_t held_bytes = 0;      // weights, gradients, states: what grows with the model
  int64_t buffer_bytes = 0;    // all else that the plan charges
  int64_t sent_bytes = 0;      // of weights and gradients, a step
  int64_t said_bytes = 0;      // of announcements, norms and the like, a step
};

/// FNV-1a over the bits of masters and states. Collective.
uint64_t digest_of(Engine& engine) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  const auto mix = [&](std::span<const float> values) {
    for (const float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3ULL;
  };
  for (int32_t u = 0; u < static_cast<int32_t>(engine.layout().units.size()); ++u) {
    const engine::Unit& unit = engine.layout().units[u];
    for (int32_t s = 0; s < static_cast<int32_t>(unit.segments.size()); ++s) {
      std::vector<float> values(static_cast<size_t>(unit.segments[s].elements));
      engine.read_weight(u, s, std::as_writable_bytes(std::span(values)), "F32");
      mix(values);
      for (const optim::ComponentSpec& spec : unit.components()) {
        if (spec.role != optim::Role::state) continue;
        engine.read_state(u, s, spec.name, values);
        mix(values);
      }
    }
  }
  return hash;
}

Measured train(const BatchModel& model, int steps, int stage, std::unique_ptr<engine::Communicator> ranks) {
  const int rank = ranks->rank(), world = ranks->world();
  engine::Config config;
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
  out.digest = digest_of(engine);
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

/// The losses of the batch, from each rank's shares, and the digest that all ranks have.
nlohmann::json learnt(Measured own, const BatchModel& model, engine::Communicator& ranks) {
  ranks.all_reduce_sum(own.losses);
  std::vector<uint64_t> digests(static_cast<size_t>(ranks.world()));
  digests[ranks.rank()] = own.digest;
  ranks.all_gather(std::as_writable_bytes(std::span(digests)));
  for (const uint64_t digest : digests) {
    if (digest != own.digest)
      throw std::runtime_error(
          fmt::format("ranks read different weights: {:x} and {:x}", own.digest, digest));
  }
  const auto alone = train(model, kSteps, 3, engine::make_self_communicator()).losses;
  double worst = 0;
  for (size_t i = 0; i < alone.size(); ++i)
    worst = std::max(worst, std::abs(own.losses[i] - alone[i]) / alone[i]);
  return {{"losses", own.losses}, {"loss_diff", worst}, {"digest", fmt::format("{:016x}", digests.front())}};
}

}  // namespace

std::string measure_row(const char* transport, int stage, const Join& join) {
  const Measured deep = train(kDeep, kDeepSteps, stage, join());
  Measured fp32 = train(shallow(Format::fp32), kSteps, stage, join());
  Measured bf16 = train(shallow(Format::exact), kSteps, stage, join());
  const auto ranks = join();
  const int world = ranks->world();
  const auto elements = static_cast<double>(deep.elements);
  const double plain = 2.0 * 2.0 * elements * (world - 1) / world;  // a ring's all-reduce of bf16 gradients
  const nlohmann::json row = {
      {"transport", transport},
      {"world", world},
      {"stage", stage},
      {"bytes_per_param", static_cast<double>(deep.held_bytes) / elements},
      {"formula", formula(stage, world)},
      {"buffer_bytes", deep.buffer_bytes},
      {"volume_vs_data_parallel", world > 1 ? static_cast<double>(deep.sent_bytes) / plain : 0},
      {"announced_vs_data_parallel", world > 1 ? static_cast<double>(deep.said_bytes) / plain : 0},
      {"fp32", learnt(std::move(fp32), shallow(Format::fp32), *ranks)},
      {"bf16", learnt(std::move(bf16), shallow(Format::exact), *ranks)}};
  ranks->barrier();
  return row.dump();
}

}  // namespace overspill::bench
