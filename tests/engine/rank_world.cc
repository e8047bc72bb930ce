#include "tests/engine/rank_world.h"

#include <fmt/format.h>
#include <unistd.h>

#include <bit>
#include <filesystem>
#include <thread>

#include "engine/collectives/in_process.h"
#include "engine/resources.h"
#include "io/memory_store.h"
#include "tests/engine/around.h"

namespace overspill::testing {

std::unique_ptr<engine::Engine> toy_rank(const RankOptions& options,
                                         std::unique_ptr<engine::Communicator> ranks,
                                         std::shared_ptr<engine::Traffic> traffic) {
  return model_rank(toy_units(options.kind), options, std::move(ranks), std::move(traffic));
}

std::unique_ptr<engine::Engine> model_rank(const std::vector<engine::UnitSpec>& units,
                                           const RankOptions& options,
                                           std::unique_ptr<engine::Communicator> ranks,
                                           std::shared_ptr<engine::Traffic> traffic) {
  engine::Config config;
  config.stage = options.stage;
  config.host_budget_bytes = options.host_budget_bytes;
  config.device_budget_bytes = options.device_budget_bytes;
  config.nvme = {std::filesystem::temp_directory_path()};
  config.job = fmt::format("{}-{}-{}", options.job, ::getpid(), ranks->rank());
  config.threads = 1;
  config.prefetch_units = options.prefetch_units;
  config.bucket_bytes = options.bucket_bytes;
  config.gradient_accumulation = options.micro_batches;
  config.micro_batches_together = options.together;
  config.max_grad_norm = options.max_grad_norm;
  config.speculate = options.speculate;
  config.library_sums = options.library_sums;
  config.sum_over_ranks = options.sum_over_ranks;
  config.rank_timeout_ms = options.rank_timeout_ms;
  config.chunk_elements = 2048;
  config.placement = options.placement;
  config.poison = options.poison;
  engine::ResourceOptions kinds{options.device, "memory", static_cast<uint64_t>(ranks->rank() + 3),
                                options.given_device};
  if (options.reaches) {
    if (kinds.given_device == nullptr) kinds.given_device = engine::make_device(options.device, kinds.seed);
    ranks = std::make_unique<Reaching>(std::move(ranks), kinds.given_device);
  }
  if (traffic != nullptr) ranks = count_traffic(std::move(ranks), std::move(traffic));
  engine::Resources resources = make_resources(units, config, kinds, std::move(ranks));
  if (options.write_error > 0 || options.store_delay.count() > 0 ||
      options.store_bytes != RankOptions().store_bytes) {
    io::Faults faults;
    faults.seed = kinds.seed;
    faults.write_error = options.write_error;
    faults.delay_min = faults.delay_max = options.store_delay;
    resources.store = io::make_memory_store(options.store_bytes, faults, 65536);
  }
  return std::make_unique<engine::Engine>(units, config, std::move(resources));
}

std::vector<std::string> on_ranks(int world,
                                  const std::function<void(int, std::unique_ptr<engine::Communicator>)>& body,
                                  std::chrono::milliseconds timeout) {
  auto ranks = engine::make_in_process_world(world, timeout);
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank, std::move(ranks[rank]));
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

uint64_t digest(const std::vector<float>& contents, const std::vector<engine::StepResult>& results) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  const auto mix = [&](uint64_t word) { hash = (hash ^ word) * 0x100000001b3ULL; };
  for (const float value : contents) mix(std::bit_cast<uint32_t>(value));
  for (const engine::StepResult& result : results) mix(std::bit_cast<uint64_t>(result.norm));
  return hash;
}

}  // namespace overspill::testing
