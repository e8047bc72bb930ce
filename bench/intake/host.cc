#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/intake/intake.h"
#include "bench/intake/limits.h"
#include "cpu_optim/optimizer.h"
#include "engine/engine.h"
#include "engine/resources.h"

namespace overspill::bench {
namespace {

constexpr int64_t kUnits = 12;
constexpr int64_t kRows = 2048, kColumns = 4096;
constexpr int64_t kElements = kRows * kColumns;  // of a unit
constexpr int64_t kShare = 512 << 10;            // elements that a worker takes at a time

double seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

std::unique_ptr<engine::Engine> make_engine(int64_t micro_batches) {
  std::vector<engine::UnitSpec> units;
  for (int64_t u = 0; u < kUnits; ++u) {
    const std::string name = fmt::format("layer{}", u);
    units.push_back({name, optim::Format::exact, "BF16", {{name + ".weight", {kRows, kColumns}, 0, {}}}});
  }
  engine::Config config;
  config.host_budget_bytes = int64_t{8} << 30;
  config.threads = kThreads;
  config.gradient_accumulation = micro_batches;
  return std::make_unique<engine::Engine>(units, config, make_resources(units, config, {}));
}

/// As stores that pass the caches want it.
struct alignas(64) CacheLine {
  std::byte bytes[64];
};

/// The same bytes as the engine's: gradients of all units from `from`, to memory of their own.
class Limit {
 public:
  explicit Limit(int64_t micro_batches)
      : micro_batches_(micro_batches),
        executor_(optim::make_executor(kThreads)),
        to_(static_cast<size_t>(kUnits * kElements * (micro_batches > 1 ? 4 : 2)) / sizeof(CacheLine)) {}

  void run(const IntakeLimit& limit, const std::byte* from) {
    for (int64_t micro = 0; micro < micro_batches_; ++micro) {
      const auto loop = micro_batches_ == 1 ? limit.write2 : micro == 0 ? limit.write4 : limit.change4;
      executor_->parallel_for(kUnits * kElements / kShare, [&](int64_t i) {
        loop(from, reinterpret_cast<std::byte*>(to_.data()), i * kShare, (i + 1) * kShare);
      });
    }
  }

 private:
  int64_t micro_batches_;
  std::unique_ptr<optim::Executor> executor_;
  std::vector<CacheLine> to_;
};

void give_all(engine::Engine& engine, std::span<const std::byte> gradients, int64_t micro_batches) {
  for (int64_t micro = 0; micro < micro_batches; ++micro) {
    engine.begin_pass({true, true});
    for (int32_t u = kUnits - 1; u >= 0; --u)
      engine.add_gradient(u, 0, gradients.subspan(static_cast<size_t>(u * kElements * 2), kElements * 2),
                          "BF16");
  }
}

}  // namespace

HostIntake host_intake(int64_t micro_batches, int rounds) {
  const auto engine = make_engine(micro_batches);
  Limit limit(micro_batches);
  const std::vector<std::byte> gradients(static_cast<size_t>(kUnits * kElements * 2), std::byte{0x3f});
  HostIntake out{.micro_batches = micro_batches};
  constexpr double kAll = kUnits * kElements;
  out.bytes = micro_batches == 1 ? kAll * 4 : kAll * (6 + 10 * static_cast<double>(micro_batches - 1));
  std::vector<double> ours, limits, ratios;
  for (int round = -1; round < rounds; ++round) {  // the first one warms up
    const double own = seconds([&] { give_all(*engine, gradients, micro_batches); });
    engine->clear_gradients();
    double best = std::numeric_limits<double>::max();
    for (const IntakeLimit& form : intake_limits())
      best = std::min(best, seconds([&] { limit.run(form, gradients.data()); }));
    if (round < 0) continue;
    ours.push_back(own);
    limits.push_back(best);
    ratios.push_back(best / own);
  }
  out.seconds = median(ours);
  out.limit_seconds = median(limits);
  out.ratio = median(ratios);
  return out;
}

}  // namespace overspill::bench
