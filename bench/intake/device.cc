#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/intake/intake.h"
#include "cpu_optim/optimizer.h"
#include "engine/engine.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "kernels/clock.h"
#include "kernels/simulated_device.h"

namespace overspill::bench {
namespace {

using engine::Engine;
using engine::Lease;
using engine::Queue;

// A Llama of 7 B: 32 layers of 4096 and 11008, 32,000 words. Every matrix has a fiftieth of its elements.
constexpr int64_t kScale = 50;
constexpr int kLayers = 32;
constexpr int64_t kSquare = 4096 * 4096 / kScale, kWide = 4096 * 11008 / kScale,
                  kWords = 32000 * 4096 / kScale;
constexpr int64_t kNorm = 4096 / kScale;
constexpr int64_t kLinkBytes = 25'000'000'000 / kScale;  // a second
// 16,384 tokens: 2 x 6.7e9 x 16,384 operations forward, twice as many backward, at 470e12 a second.
constexpr std::chrono::microseconds kForward{467'000 / kLayers}, kBackward{2 * kForward};

std::vector<engine::UnitSpec> llama() {
  std::vector<engine::UnitSpec> units;
  const auto add = [&](const std::string& name, const std::vector<std::pair<const char*, int64_t>>& parts) {
    engine::UnitSpec unit{name, optim::Format::exact, "BF16", {}};
    for (const auto& [part, elements] : parts)
      unit.segments.push_back({name + "." + part, {elements}, 0, {}});
    units.push_back(unit);
  };
  add("embed", {{"weight", kWords}});
  for (int i = 0; i < kLayers; ++i) {
    add(fmt::format("layer{}", i), {{"q", kSquare},
                                    {"k", kSquare},
                                    {"v", kSquare},
                                    {"o", kSquare},
                                    {"gate", kWide},
                                    {"up", kWide},
                                    {"down", kWide},
                                    {"norm1", kNorm},
                                    {"norm2", kNorm}});
  }
  add("head", {{"norm", kNorm}, {"weight", kWords}});
  return units;
}

/// Computes by the clock alone, on a queue of its own.
class Framework {
 public:
  explicit Framework(kernels::Device& device) : stream_(device.make_stream()) {
    const int64_t bytes = std::max(kWide, kWords) * 2;
    gradient_ = device.allocate(bytes);
    const std::vector<std::byte> values(static_cast<size_t>(bytes), std::byte{0x3c});
    stream_->copy_from_host(gradient_.data(), values.data(), bytes);
    stream_->record().wait();
  }
  ~Framework() { stream_->record().wait(); }
  Framework(const Framework&) = delete;
  Framework& operator=(const Framework&) = delete;

  void forward(Engine& engine) {
    engine.begin_pass({true, true});
    for (int32_t u = 0; u < std::ssize(engine.layout().units); ++u) {
      const Lease lease = engine.acquire(u, queue());
      compute(engine, u, kForward);
    }
  }
  void backward(Engine& engine) {
    for (auto u = static_cast<int32_t>(engine.layout().units.size()) - 1; u >= 0; --u) {
      const Lease lease = engine.acquire(u, queue());
      compute(engine, u, kBackward);
      const engine::Unit& unit = engine.layout().units[u];
      for (auto s = static_cast<int32_t>(unit.segments.size()) - 1; s >= 0; --s)
        engine.add_gradient(u, s, {gradient_.data(), unit.segments[s].elements * 2, "BF16", nullptr},
                            queue());
    }
  }
  kernels::Event now() { return stream_->record(); }

 private:
  Queue queue() { return {stream_->native()}; }
  /// Layers take their time; embedding and head as much as their parameters have of a layer's.
  void compute(const Engine& engine, int32_t unit, std::chrono::microseconds layer) {
    const auto share = static_cast<double>(engine.layout().units[unit].elements) /
                       static_cast<double>(4 * kSquare + 3 * kWide);
    const std::chrono::microseconds time(static_cast<int64_t>(static_cast<double>(layer.count()) * share));
    static_cast<kernels::SimulatedQueue*>(stream_->native())->enqueue([time] {
      std::this_thread::sleep_for(time);
    });
  }

  kernels::DeviceMemory gradient_;  // of every segment
  std::unique_ptr<kernels::Stream> stream_;
};

double seconds(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) * 1e-9;
}

}  // namespace

DeviceIntake device_intake(int64_t micro_batches, bool sums_there, int steps) {
  kernels::SimulatedDeviceOptions simulated;
  simulated.delay_max = simulated.delay_min;
  simulated.link_bytes_per_s = kLinkBytes;
  simulated.poison = false;
  const auto units = llama();
  engine::Config config;
  config.host_budget_bytes = int64_t{8} << 30;
  config.threads = kThreads;
  config.max_grad_norm = 1e9;  // it is never the gradients that are clipped
  config.gradient_accumulation = micro_batches;
  int64_t elements = 0;
  for (const auto& unit : units) {
    for (const auto& segment : unit.segments) elements += segment.shape[0];
  }
  // Weights stay; then sums, 4 bytes each, or nothing more.
  config.device_budget_bytes = elements * (sums_there ? 6 : 2) + (int64_t{8} << 20);
  engine::ResourceOptions options;
  options.given_device = kernels::make_simulated_device(simulated);
  engine::Resources resources = make_resources(units, config, options);
  const std::shared_ptr<kernels::Device> device = resources.device;
  Engine engine(units, config, std::move(resources));
  const bool all_sums = engine.plan().accumulators_device_bytes >= elements * 4;
  if (all_sums != (sums_there && micro_batches > 1) || engine.plan().units_on_device() > 0)
    throw std::logic_error("the plan is not the one to be measured:\n" + engine.plan().text());
  Framework framework(*device);
  const std::vector<optim::Hyper> groups{optim::AdamConfig{.lr = 1e-9}};
  std::vector<double> tails, times;
  std::optional<int64_t> before;
  for (int step = -1; step < steps; ++step) {
    for (int64_t micro = 0; micro < micro_batches; ++micro) {
      framework.forward(engine);
      framework.backward(engine);
    }
    const kernels::Event computed = framework.now();
    engine.step(groups);
    const int64_t done = kernels::steady_now_ns();
    computed.wait();
    if (before) {
      times.push_back(seconds(done - *before));
      tails.push_back(seconds(done - *computed.reached_ns()));
    }
    before = done;
  }
  engine.synchronize();
  std::ranges::sort(times);
  std::ranges::sort(tails);
  return {micro_batches, sums_there, times[times.size() / 2], tails[tails.size() / 2]};
}

}  // namespace overspill::bench
